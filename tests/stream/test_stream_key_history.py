"""The history holds every key by slot, whatever the cache still shows, and never writes to the host's tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.key_history import KeyHistory


def keys(n, batch=2, heads=3, d=4):
    """Key j of head h holds its own number."""
    value = torch.arange(n, dtype=torch.float32)[None, None, :, None] + 100 * torch.arange(heads)[None, :, None, None]
    return (value + 1000 * torch.arange(batch)[:, None, None, None]).expand(batch, heads, n, d).clone()


@settings(max_examples=120, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    window=st.integers(2, 9),
    slack=st.integers(0, 3),
)
def test_a_cache_that_slides(chunks, window, slack):
    """A dynamic sliding cache shows the last window - 1 past keys and the new ones, in fresh tensors."""
    everything = keys(sum(chunks))
    history, seen = KeyHistory(), 0
    for new in chunks:
        past = min(seen, window - 1 + slack)
        seen += new
        history.see(everything[:, :, seen - new - past : seen].clone(), new=new, seen=seen)
        assert torch.equal(history.keys, everything[:, :, :seen])


@settings(max_examples=60, deadline=None)
@given(chunks=st.lists(st.integers(1, 7), min_size=1, max_size=8), slack=st.integers(0, 5))
def test_a_cache_that_holds_all_is_referred_to(chunks, slack):
    everything = keys(sum(chunks))
    history, seen = KeyHistory(), 0
    for new in chunks:
        seen += new
        shown = torch.full((2, 3, seen + slack, 4), torch.nan)  # a static cache has room at the end
        shown[:, :, :seen] = everything[:, :, :seen]
        history.see(shown, new=new, seen=seen)
        assert torch.equal(history.keys, everything[:, :, :seen])
        assert history.keys.data_ptr() == shown.data_ptr(), "copied without need"


@pytest.mark.parametrize("then", ["slides", "is whole again"])
def test_the_hosts_tensors_are_not_written_to(then):
    everything = keys(12)
    history = KeyHistory()
    shown = [everything[:, :, :6].clone(), everything[:, :, 3:7].clone(), everything[:, :, 4:8].clone()]
    if then == "is whole again":
        shown[2] = everything[:, :, :8].clone()
    before = [tensor.clone() for tensor in shown]
    for n, tensor in zip((6, 7, 8), shown, strict=True):
        history.see(tensor, new=6 if n == 6 else 1, seen=n)
    history.see(everything[:, :, 5:9].clone(), new=1, seen=9)
    for tensor, untouched in zip(shown, before, strict=True):
        assert torch.equal(tensor, untouched)
    assert torch.equal(history.keys, everything[:, :, :9])


@pytest.mark.parametrize("window", [3, 5])
@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_a_static_cache_that_rolls_its_buffer_in_place(window, prompt):
    """A StaticSlidingWindowLayer of transformers overwrites what was shown before: right or refused."""
    everything = keys(10)
    history = KeyHistory()
    buffer = torch.zeros(2, 3, window, 4)
    buffer[:, :, :prompt] = everything[:, :, :prompt]
    history.see(buffer, new=prompt, seen=prompt)
    for seen in range(prompt + 1, 11):
        if seen > window:
            buffer.copy_(buffer.roll(-1, 2))
        buffer[:, :, min(seen, window) - 1] = everything[:, :, seen - 1]
        try:
            history.see(buffer, new=1, seen=seen)
        except ValueError:
            assert seen > window, "refused before anything was lost"
            return
        assert torch.equal(history.keys, everything[:, :, :seen]), f"after {seen} tokens"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_dtype_stays(dtype):
    history = KeyHistory()
    history.see(keys(4).to(dtype), new=4, seen=4)
    history.see(keys(5)[:, :, 2:].to(dtype), new=1, seen=5)
    assert history.keys.dtype == dtype
    assert torch.equal(history.keys, keys(5).to(dtype))


def test_no_graph_is_kept():
    history = KeyHistory()
    history.see(keys(4).requires_grad_(), new=4, seen=4)
    assert not history.keys.requires_grad
    history.see(keys(5)[:, :, 2:].requires_grad_(), new=1, seen=5)
    assert not history.keys.requires_grad


@pytest.mark.parametrize(
    ("shown", "new", "seen"),
    [
        (3, 1, 9),  # a token was missed in between
        (3, 4, 9),  # a chunk of four, of which the first key is not shown
        (3, 3, 6),  # keys of before the first sight
    ],
)
def test_keys_that_were_never_shown(shown, new, seen):
    history = KeyHistory()
    if seen != 6:
        history.see(keys(5), new=5, seen=5)
    with pytest.raises(ValueError, match=f"shows {shown} keys of {seen} tokens, and {0 if seen == 6 else 5} were seen"):
        history.see(keys(seen)[:, :, -shown:], new=new, seen=seen)


def test_growing_costs_no_copy_at_every_step():
    history = KeyHistory()
    history.see(keys(4), new=4, seen=4)
    places = set()
    for seen in range(5, 400):
        history.see(keys(3), new=1, seen=seen)
        places.add(history.keys.data_ptr())
    assert history.keys.shape[2] == 399
    assert len(places) < 12
