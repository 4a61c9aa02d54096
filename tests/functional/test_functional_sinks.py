"""Sink score and row entropy: closed forms, theorems, and loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import row_entropy, sink_score
from attnprobe.functional.sinks import without_keys

shapes = st.tuples(st.integers(1, 9), st.integers(0, 10_000), st.sampled_from([0.0, 1.0, 4.0, 1000.0]))


def entropy_loop(row):
    return -sum(weight * math.log(weight) for weight in row if weight > 0)


@settings(max_examples=30, deadline=None)
@given(shape=shapes, causal=st.booleans(), data=st.data())
def test_sink_score_is_a_mean_of_sums(make_pattern, shape, causal, data):
    n, seed, scale = shape
    pattern = make_pattern(n, seed=seed, scale=scale, causal=causal)
    keys = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True))
    expected = sum(pattern[i, j].item() for i in range(n) for j in keys if j < n) / n
    assert sink_score(pattern, keys).item() == pytest.approx(expected, abs=1e-13)


@settings(max_examples=30, deadline=None)
@given(shape=shapes)
def test_sink_scores_of_all_keys_sum_to_one(make_pattern, shape):
    n, seed, scale = shape
    pattern = make_pattern(n, seed=seed, scale=scale, causal=True)
    each = [sink_score(pattern, [j]).item() for j in range(n)]
    assert sum(each) == pytest.approx(1.0)
    assert sink_score(pattern, range(n)).item() == pytest.approx(1.0)
    assert each[0] >= 1 / n - 1e-12  # the first row has nowhere else to look


@pytest.mark.parametrize("n", [1, 2, 40])
def test_uniform_attention(uniform_causal, n):
    pattern = uniform_causal(n)
    assert sink_score(pattern).item() == pytest.approx(sum(1 / i for i in range(1, n + 1)) / n)
    assert row_entropy(pattern).item() == pytest.approx(math.lgamma(n + 1) / n)
    if n > 1:  # without the first token, row i spreads over i - 1 keys, and the first row does not count
        assert row_entropy(pattern, exclude=(0,)).item() == pytest.approx(math.lgamma(n) / (n - 1))


@settings(max_examples=40, deadline=None)
@given(shape=shapes, causal=st.booleans())
def test_row_entropy_is_a_mean_of_entropies(make_pattern, shape, causal):
    n, seed, scale = shape
    pattern = make_pattern(n, seed=seed, scale=scale, causal=causal)
    found = row_entropy(pattern).item()
    assert found == pytest.approx(sum(map(entropy_loop, pattern.tolist())) / n, abs=1e-12)
    assert 0 <= found <= math.log(n) + 1e-12


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 9), seed=st.integers(0, 10_000), scale=st.sampled_from([0.0, 1.0, 4.0]))
def test_entropy_is_that_of_going_to_the_sink_and_of_the_rest(make_pattern, n, seed, scale):
    """The chain rule, row by row: H(row) = h2(a) + (1 - a) H(row without the sink), a being what the sink takes."""
    pattern = make_pattern(n, seed=seed, scale=scale)
    for row in pattern:
        a = row[0].item()
        binary = entropy_loop([a, 1 - a])
        rest = row_entropy(row[None], exclude=(0,)).item()
        assert row_entropy(row[None]).item() == pytest.approx(binary + (1 - a) * rest, abs=1e-12)


def test_rows_with_nothing_left_do_not_count():
    pattern = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.25, 0.25]], dtype=torch.float64)
    assert row_entropy(pattern, exclude=(0,)).item() == pytest.approx(math.log(2))
    assert row_entropy(pattern[:2], exclude=(0,)).isnan()
    assert row_entropy(pattern, exclude=(0, 1, 2)).isnan()
    assert row_entropy(pattern, exclude=(7,)).item() == pytest.approx(row_entropy(pattern).item())


def test_a_rest_that_is_tiny_is_a_distribution_too():
    row = torch.tensor([[1.0, 2e-30, 2e-30, 4e-30]])
    rest, left = without_keys(row, (0,))
    torch.testing.assert_close(rest, torch.tensor([[0.0, 0.25, 0.25, 0.5]]))
    assert left.tolist() == [True]


def test_a_sink_that_is_no_token():
    block = torch.tensor([[0.5, 0.0], [0.25, 0.25]], dtype=torch.float64)
    assert sink_score(block, rows="sink").item() == 0.375
    assert sink_score(block, rows="renormalize").item() == 0.75
    assert row_entropy(block, rows="sink").item() == pytest.approx((math.log(2) + 1.5 * math.log(2)) / 2)
    # dropped together with the first token: only the second row has something left, all of it on one key
    assert row_entropy(block, exclude=(0,), rows="sink").item() == 0.0


def test_positions_count_real_tokens(make_pattern, pad_pattern):
    pattern = make_pattern(5, seed=3, causal=True)
    padded, mask = pad_pattern(pattern, 2, 1)
    for keys in ([0], [3, 1]):
        assert sink_score(padded, keys, mask=mask).item() == pytest.approx(sink_score(pattern, keys).item())
        found = row_entropy(padded, exclude=keys, mask=mask).item()
        assert found == pytest.approx(row_entropy(pattern, exclude=keys).item())


@pytest.mark.parametrize(
    ("keys", "error", "match"),
    [
        ([], ValueError, "at least one position"),
        ([-1], ValueError, "counted from 0"),
        ([1, 1], ValueError, "each of them once"),
        (2, TypeError, "a list of whole numbers"),
        ([0.5], TypeError, "a list of whole numbers"),
        ([True], TypeError, "a list of whole numbers"),
        ("a", TypeError, "a list of whole numbers"),
    ],
)
def test_keys_that_are_none(keys, error, match):
    with pytest.raises(error, match=match):
        sink_score(torch.eye(3), keys)
    if keys != []:
        with pytest.raises(error, match=match):
            row_entropy(torch.eye(3), exclude=keys)
