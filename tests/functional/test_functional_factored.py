"""Factors stand for the dense float64 softmax, whatever is cut out of them."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional.factored import Factors

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}


def dense(q, k, position, kv_head, scaling, window=None):
    """[batch, head, query, key], one row at a time; the factors' dtype is only that of their entries."""
    q, k = q.double(), k.double()
    out = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                p = int(position[b, i])
                if p < 0:
                    continue
                low = 0 if window is None else max(0, p - window + 1)
                score = scaling * (k[b, kv_head[h], low : p + 1] @ q[b, h, i])
                out[b, h, i, low : p + 1] = torch.exp(score - score.max()) / torch.exp(score - score.max()).sum()
    return out


def entries(*shape, seed=0, dtype=torch.float32, scale=1.5):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def factors_of(
    *, batch=2, heads=4, kv_heads=2, first=0, n_query=9, d=8, dtype=torch.float32, window=None, kv_head=None, seed=0
):
    """Unpadded rows `first` to `first + n_query` of a sequence of that length."""
    kv_head = tuple(h * kv_heads // heads for h in range(heads)) if kv_head is None else kv_head
    q = entries(batch, len(kv_head), n_query, d, seed=seed, dtype=dtype)
    k = entries(batch, kv_heads, first + n_query, d, seed=seed + 1, dtype=dtype)
    position = torch.arange(first, first + n_query).expand(batch, -1)
    return Factors(q, k, position, kv_head=kv_head, scaling=0.4, window=window, first=first)


def expected_of(factors):
    return dense(factors.q, factors.k, factors.position, factors.kv_head, factors.scaling, factors.window)


def assert_equals(factors, expected):
    found = factors.pattern()
    assert found.dtype == (torch.float64 if factors.q.dtype == torch.float64 else torch.float32)
    assert found.shape[:3] == expected.shape[:3]
    n_key = found.shape[3]
    assert (expected[..., n_key:] == 0).all(), "keys with weight are missing"
    torch.testing.assert_close(found.double(), expected[..., :n_key], rtol=0, atol=TOLERANCE[factors.q.dtype])
    assert ((found == 0) | (expected[..., :n_key] > 0)).all(), "mass where a row may not look"


# -- whole -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize("first", [0, 6])
def test_rows_are_the_softmax(dtype, window, first):
    factors = factors_of(dtype=dtype, window=window, first=first)
    assert_equals(factors, expected_of(factors))


def test_half_precision_is_only_in_the_entries():
    """Rows of bfloat16 factors sum to 1 as float32 rows do."""
    pattern = factors_of(dtype=torch.bfloat16, n_query=60).pattern()
    assert pattern.dtype == torch.float32
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 4, 60), rtol=0, atol=1e-6)


def test_float64_stays():
    factors = factors_of(dtype=torch.float64)
    assert factors.dtype == factors.scores().dtype == torch.float64


def test_scores_are_the_logits_of_the_pattern():
    factors = factors_of(window=3)
    scores = factors.scores()
    i, j = 6, 5
    wanted = 0.4 * (factors.q[1, 3, i].double() @ factors.k[1, factors.kv_head[3], j].double())
    assert float(scores[1, 3, i, j]) == pytest.approx(float(wanted), abs=1e-5)
    assert (scores[..., 2, 3:] == -torch.inf).all()
    assert (scores[..., 6, :4] == -torch.inf).all()
    assert scores[..., 6, 4:7].isfinite().all()


def test_large_scores_are_no_trouble():
    factors = dataclasses.replace(factors_of(dtype=torch.float16), scaling=200.0)
    found = factors.pattern()
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), expected_of(factors), rtol=0, atol=1e-3)


def test_one_row_of_decoding():
    factors = factors_of(first=12, n_query=1, window=5)
    pattern = factors.pattern()
    assert (pattern[..., :8] == 0).all()
    assert_equals(factors, expected_of(factors))


# -- heads and key/value heads -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_heads", "kv_head"),
    [
        (2, (0, 0, 1, 1)),  # every head, in groups
        (4, (0, 1, 2, 3)),  # no groups
        (1, (0, 0, 0)),  # one for all
        (2, (0, 1)),  # heads 1 and 2 of four: looks like no groups
        (2, (1, 0)),
        (2, (1, 1)),
        (2, (0, 0)),
        (2, (1, 0, 0)),  # a number of heads that is no multiple
        (2, (0,)),  # fewer heads than key/value heads
        (2, (1,)),
        (4, (3, 0)),
        (4, (2, 2, 0)),
        (3, (0, 0, 1, 1, 2, 2)),
        (3, (2, 2, 1, 1, 0, 0)),
    ],
)
def test_every_head_reads_its_own_keys(kv_heads, kv_head):
    factors = factors_of(kv_heads=kv_heads, kv_head=kv_head)
    assert_equals(factors, expected_of(factors))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_one_head_of_each_sequence(window, padded):
    factors = padded_factors([7, 9, 4], window=window) if padded else factors_of(batch=3, window=window)
    chosen = torch.tensor([3, 0, 2])
    one = factors.heads(chosen)
    expected = expected_of(factors)[torch.arange(3), chosen].unsqueeze(1)
    assert one.q.shape[1] == one.k.shape[1] == 1
    assert_equals(one, expected)
    assert_equals(one[2:6], expected[:, :, 2:6])
    assert_equals(factors[2:6].heads(chosen), expected[:, :, 2:6])


# -- padding -----------------------------------------------------------------------------------------------


def padded_factors(lengths, *, side="left", first=0, window=None, dtype=torch.float32, heads=4, kv_heads=2, seed=0):
    """A padded batch as the rows of a site have it: queries by slot, keys by position, the rows from slot `first`."""
    batch, width = len(lengths), max(lengths)
    position = torch.full((batch, width), -1)
    for b, n in enumerate(lengths):
        where = slice(width - n, width) if side == "left" else slice(n)
        position[b, where] = torch.arange(n)
    q = entries(batch, heads, width, 8, seed=seed, dtype=dtype)
    k = entries(batch, kv_heads, width, 8, seed=seed + 1, dtype=dtype)
    kv_head = tuple(h * kv_heads // heads for h in range(heads))
    return Factors(
        q[:, :, first:],
        k,
        position[:, first:],
        kv_head=kv_head,
        scaling=0.4,
        window=window,
        first=first,
        padded=True,
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_padded_rows_are_zero_and_the_others_right(side, window, first, dtype):
    factors = padded_factors([9, 3, 6], side=side, window=window, first=first, dtype=dtype)
    expected = expected_of(factors)
    assert_equals(factors, expected)
    padding = (factors.position < 0)[:, None].expand(-1, 4, -1)
    assert padding.any() or (side == "left" and first == 5)
    assert (factors.pattern()[padding] == 0).all()


@pytest.mark.parametrize("window", [None, 3])
def test_a_padded_query_may_hold_anything(window):
    factors = padded_factors([9, 3], window=window)
    q = factors.q.clone()
    q[1, :, :6] = torch.nan
    broken = dataclasses.replace(factors, q=q)
    torch.testing.assert_close(broken.pattern(), factors.pattern())


def test_a_sequence_in_a_padded_batch_is_the_sequence_alone():
    factors = padded_factors([9, 3, 6])
    for b, n in enumerate([9, 3, 6]):
        alone = Factors(
            factors.q[b : b + 1, :, 9 - n :],
            factors.k[b : b + 1, :, :n],
            torch.arange(n)[None],
            kv_head=factors.kv_head,
            scaling=0.4,
        )
        found = factors.pattern()[b : b + 1, :, 9 - n :]
        torch.testing.assert_close(found[..., :n], alone.pattern(), rtol=0, atol=1e-6)
        assert (found[..., n:] == 0).all()


# -- slices ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_slice_is_those_rows(data):
    window = data.draw(st.sampled_from([None, 1, 2, 5]))
    first = data.draw(st.integers(0, 5))
    if data.draw(st.booleans()):
        lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(lambda ns: [9, *ns]))
        factors = padded_factors(
            lengths, side=data.draw(st.sampled_from(["left", "right"])), window=window, first=first
        )
    else:
        factors = factors_of(first=first, window=window)
    n = factors.q.shape[2]
    low = data.draw(st.integers(0, n))
    high = data.draw(st.integers(low, n))
    part, expected = factors[low:high], expected_of(factors)[:, :, low:high]
    assert part.q.shape[2] == high - low
    assert part.k.shape[2] <= factors.first + high
    assert_equals(part, expected)
    # a slice of the slice
    inner = data.draw(st.integers(0, high - low))
    assert_equals(part[inner:], expected[:, :, inner:])


def test_slices_take_no_more_keys_than_they_reach():
    factors = factors_of(first=6)
    assert factors[2:4].k.shape[2] == 10
    assert factors[:4].first == 6
    assert factors[2:].first == 8
    assert factors[-3:].pattern().shape[2:] == (3, 15)
    assert factors[3:3].pattern().shape == (2, 4, 0, 9)


# -- anything ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    data=st.data(),
    window=st.sampled_from([None, 1, 3, 50]),
    side=st.sampled_from(["left", "right"]),
)
def test_any_heads_of_any_batch(lengths, kv_heads, data, window, side):
    kv_head = tuple(data.draw(st.lists(st.integers(0, kv_heads - 1), min_size=1, max_size=5)))
    factors = padded_factors(
        lengths, side=side, window=window, heads=len(kv_head), kv_heads=kv_heads, seed=len(lengths)
    )
    factors = dataclasses.replace(factors, kv_head=kv_head)
    assert_equals(factors, expected_of(factors))


def test_factors_are_not_changed_by_being_read():
    factors = factors_of(window=3)
    before = factors.q.clone(), factors.k.clone()
    factors.pattern()
    factors[2:5].scores()
    assert torch.equal(factors.q, before[0])
    assert torch.equal(factors.k, before[1])


def test_a_gradient_passes():
    factors = factors_of(dtype=torch.float64, n_query=4, d=3, batch=1)
    q = factors.q.requires_grad_()
    assert torch.autograd.gradcheck(lambda q: dataclasses.replace(factors, q=q).pattern(), (q,))
