"""The largest pre-softmax score: loops, and what the pattern does not show."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import maximum_score


def causal_scores(n, seed, scale=3.0):
    scores = scale * torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), seed=st.integers(0, 10_000), shift=st.floats(-50, 50))
def test_it_is_a_mean_of_maxima_that_the_pattern_does_not_show(n, seed, shift):
    scores = causal_scores(n, seed)
    pattern = scores.softmax(-1)
    expected = sum(max(row[: i + 1]) for i, row in enumerate(scores.tolist())) / n
    assert maximum_score(scores, pattern).item() == pytest.approx(expected)
    torch.testing.assert_close((scores + shift).softmax(-1), pattern)
    assert maximum_score(scores + shift, pattern).item() == pytest.approx(expected + shift)


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, 0.0, 1e9])
def test_what_stands_for_hidden_keys_does_not_matter(hidden):
    scores = causal_scores(6, 1)
    shown = scores.where(scores.isfinite(), hidden)
    assert maximum_score(shown, scores.softmax(-1)).item() == maximum_score(scores, scores.softmax(-1)).item()


def test_a_sink_takes_its_share_of_every_row():
    scores = causal_scores(5, 2)
    found = maximum_score(scores, 0.3 * scores.softmax(-1), rows="sink").item()
    assert found == pytest.approx(maximum_score(scores, scores.softmax(-1)).item())


def test_what_is_refused():
    scores = causal_scores(4, 3)
    with pytest.raises(ValueError, match="not the softmax of the scores"):
        maximum_score(scores.softmax(-1), scores.softmax(-1))
    with pytest.raises(ValueError, match="scores have shape"):
        maximum_score(scores[:2], scores.softmax(-1))
