"""Mean look-back: closed forms, theorems, and loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import mean_look_back


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 1.0, 4.0, 1000.0]),
    causal=st.booleans(),
)
def test_it_is_a_mean_of_distances(make_pattern, n, seed, scale, causal):
    pattern = make_pattern(n, seed=seed, scale=scale, causal=causal)
    expected = sum(pattern[i, j].item() * (i - j) for i in range(n) for j in range(n)) / n
    found = mean_look_back(pattern).item()
    assert found == pytest.approx(expected, abs=1e-12)
    if causal:
        assert -1e-12 <= found <= (n - 1) / 2 + 1e-12
    # read from the other end, what was behind is ahead
    assert mean_look_back(pattern.flip(-1, -2)).item() == pytest.approx(-found, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 41])
def test_closed_forms(uniform_causal, n):
    assert mean_look_back(uniform_causal(n)).item() == pytest.approx((n - 1) / 4)
    assert mean_look_back(torch.eye(n)).item() == 0.0
    first = torch.zeros(n, n)
    first[:, 0] = 1
    assert mean_look_back(first).item() == pytest.approx((n - 1) / 2)
    assert mean_look_back(first, exclude=(0,)).isnan()


def test_a_window_looks_back_half_its_width(window_causal):
    n, width = 400, 9
    early = sum((i - 1) / 2 for i in range(1, width))  # the first rows see less
    expected = (early + (n - width + 1) * (width - 1) / 2) / n
    assert mean_look_back(window_causal(n, width)).item() == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 9), seed=st.integers(0, 10_000))
def test_without_a_sink_it_is_that_of_the_rest(make_pattern, n, seed):
    pattern = make_pattern(n, seed=seed, causal=True)
    rest = pattern[1:, 1:] / pattern[1:, 1:].sum(-1, keepdim=True)
    assert mean_look_back(pattern, exclude=(0,)).item() == pytest.approx(mean_look_back(rest).item())


def test_needs_a_square_pattern(make_pattern):
    with pytest.raises(ValueError, match="a distance is between the positions"):
        mean_look_back(make_pattern(2, 3))
    with pytest.raises(ValueError, match="counted from 0"):
        mean_look_back(make_pattern(3), exclude=(-1,))
