"""Value-weighted attention: closed forms, theorems, and loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import row_entropy, sink_score, value_weighted_attention


def random_values(n, seed, d=3):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 9), seed=st.integers(0, 10_000), causal=st.booleans(), data=st.data())
def test_it_is_what_loops_find(make_pattern, n, seed, causal, data):
    pattern, values = make_pattern(n, seed=seed, causal=causal), random_values(n, seed)
    keys = data.draw(st.lists(st.integers(0, n), min_size=1, max_size=3, unique=True))
    shares, entropies = [], []
    for row in pattern:
        norms = [(weight * value).norm().item() for weight, value in zip(row, values, strict=True)]
        weighed = [norm / sum(norms) for norm in norms]
        shares.append(sum(weighed[j] for j in keys if j < n))
        entropies.append(-sum(w * math.log(w) for w in weighed if w > 0))
    found = value_weighted_attention(pattern, values, keys)
    assert found.sink_score.item() == pytest.approx(sum(shares) / n, abs=1e-12)
    assert found.row_entropy.item() == pytest.approx(sum(entropies) / n, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_only_the_ratios_of_norms_matter(make_pattern, n, seed, scale):
    pattern, values = make_pattern(n, seed=seed, causal=True), random_values(n, seed)
    rotation = torch.linalg.qr(random_values(3, seed + 1)).Q
    one, other = (value_weighted_attention(pattern, v) for v in (values, scale * values @ rotation))
    for found, expected in zip(other, one, strict=True):
        assert found.item() == pytest.approx(expected.item(), abs=1e-10)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 9), seed=st.integers(0, 10_000))
def test_values_of_one_norm_weigh_nothing(make_pattern, n, seed):
    pattern, values = make_pattern(n, seed=seed, causal=True), random_values(n, seed)
    found = value_weighted_attention(pattern, values / values.norm(dim=-1, keepdim=True))
    assert found.sink_score.item() == pytest.approx(sink_score(pattern).item())
    assert found.row_entropy.item() == pytest.approx(row_entropy(pattern).item(), abs=1e-12)


def test_a_sink_without_a_value_has_no_share():
    pattern = torch.tensor([[1.0, 0.0], [0.9, 0.1]], dtype=torch.float64)
    found = value_weighted_attention(pattern, torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    assert found.sink_score.item() == 0.0  # of the second row alone: the first moves nothing
    assert value_weighted_attention(pattern, torch.zeros(2, 1)).sink_score.isnan()


def test_a_sink_that_is_no_token_has_no_value(make_pattern):
    pattern, values = make_pattern(4, seed=2, causal=True), random_values(4, 2)
    whole = value_weighted_attention(pattern, values, [1])
    for found, expected in zip(value_weighted_attention(pattern / 2, values, [1], rows="sink"), whole, strict=True):
        assert found.item() == pytest.approx(expected.item())


def test_values_of_padding_are_not_looked_at(make_pattern, pad_pattern):
    pattern, values = make_pattern(4, seed=2, lead=(2,), causal=True), random_values(4, 2)
    padded, mask = pad_pattern(pattern, 1, 2)
    wide = torch.full((7, 3), torch.nan, dtype=torch.float64)
    wide[1:5] = values
    found, expected = value_weighted_attention(padded, wide, mask=mask), value_weighted_attention(pattern, values)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_refused(make_pattern):
    pattern, values = make_pattern(4), random_values(4, 0)
    with pytest.raises(ValueError, match="one entry for each of the 4 keys"):
        value_weighted_attention(pattern, values[:3])
    with pytest.raises(ValueError, match="must be finite"):
        value_weighted_attention(pattern, values.where(values < 0, torch.inf))
    with pytest.raises(ValueError, match="at least one position"):
        value_weighted_attention(pattern, values, [])
