"""Correlations, means and roles of an atlas, by other people's code and by maps whose role is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import attnprobe as ap
from attnprobe.atlas.correlation import Resampling, correlations, mean_over_texts, spearman
from attnprobe.atlas.roles import ROLES, RoleThresholds, roles_of, uniform_entropy

NAN = float("nan")


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 30), st.integers(0, 2**32 - 1))
def test_spearman_is_scipys_with_ties(n, seed):
    random = np.random.default_rng(seed)
    x, y = random.integers(6, size=(2, n)).astype(float)
    expected = stats.spearmanr(x, y).statistic if len(set(x)) > 1 and len(set(y)) > 1 else NAN
    np.testing.assert_allclose(spearman(x, y), expected, atol=1e-12)


def test_spearman_of_many_leaves_out_heads_that_are_missing():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 5, 12))
    x[2, 3] = y[2, 7] = y[4, 0] = NAN
    for found, a, b in zip(spearman(x, y), x, y, strict=True):
        known = ~(np.isnan(a) | np.isnan(b))
        assert found == pytest.approx(stats.spearmanr(a[known], b[known]).statistic, abs=1e-12)


def test_a_mean_counts_the_texts_that_have_a_value():
    value = np.array([[1.0, NAN, NAN, 2.0], [3.0, 5.0, NAN, -np.inf]])
    np.testing.assert_array_equal(mean_over_texts(value), [2.0, 5.0, NAN, -np.inf])
    times = np.array([[2, 0], [0, 2], [1, 1]])
    expected = [[1.0, NAN, NAN, 2.0], [3.0, 5.0, NAN, -np.inf], [2.0, 5.0, NAN, -np.inf]]
    np.testing.assert_array_equal(mean_over_texts(value, times), expected)


def of_heads(by_head: np.ndarray, noise: float, n_texts: int, seed: int) -> np.ndarray:
    """[text, layer, head] values around those of each head."""
    random = np.random.default_rng(seed)
    return (by_head + noise * random.normal(size=(n_texts, len(by_head)))).reshape(n_texts, 2, -1)


def test_correlations_over_heads_with_intervals():
    random = np.random.default_rng(1)
    sink = random.normal(size=60)
    values = {
        "sink_score": of_heads(sink, 0.1, 8, 2),
        "same": of_heads(np.exp(sink), 0.0, 8, 3),
        "other": of_heads(random.normal(size=60), 0.1, 8, 4),
        "some": np.where(np.arange(60).reshape(2, 30) < 40, of_heads(-sink, 0.1, 8, 5), NAN),
    }
    found = correlations(values, "sink_score", Resampling(resamples=500))
    assert found.index.tolist() == ["same", "other", "some"]
    for name, row in found.iterrows():
        a, b = (values[one].mean(0).reshape(-1) for one in (name, "sink_score"))
        known = ~np.isnan(a)
        assert row["heads"] == known.sum()
        assert row["spearman"] == pytest.approx(stats.spearmanr(a[known], b[known]).statistic, abs=1e-12)
        assert row["low"] <= row["spearman"] <= row["high"]
        assert row["texts_low"] <= row["texts_high"]
    assert found.loc["other", "low"] < 0 < found.loc["other", "high"]
    assert found.loc["some", "high"] < -0.9
    assert found.equals(correlations(values, "sink_score", Resampling(resamples=500)))


def test_the_interval_over_heads_covers_as_often_as_it_says():
    hits = 0
    for seed in range(60):
        x, y = np.random.default_rng(seed).normal(size=(2, 80))
        values = {"x": x.reshape(1, 2, 40), "y": y.reshape(1, 2, 40)}
        row = correlations(values, "x", Resampling(resamples=300, level=0.9, seed=seed)).loc["y"]
        hits += row["low"] <= 0 <= row["high"]
        assert np.isnan(row["texts_low"])  # of one text there is no spread
    assert 46 <= hits <= 60  # 54 expected; binomial sd 2.3


def test_too_few_heads_or_no_spread_have_no_correlation():
    one = np.ones((2, 1, 2))
    assert np.isnan(correlations({"a": one, "b": one}, "a", Resampling(20)).loc["b", "spearman"])
    flat, some = np.ones((2, 1, 5)), np.arange(10.0).reshape(2, 1, 5)
    assert np.isnan(correlations({"a": flat, "b": some}, "a", Resampling(20)).loc["b"]).sum() == 5
    with pytest.raises(ValueError, match="no diagnostic 'c': choose one of a, b"):
        correlations({"a": one, "b": one}, "c", Resampling(20))


@pytest.mark.parametrize("wrong", [dict(resamples=0), dict(level=1.0), dict(level=0.0)])
def test_resampling_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="use at least one resample and a level"):
        Resampling(**wrong)


def maps(n: int) -> dict[str, np.ndarray]:
    """Patterns whose role is known."""
    causal = np.tril(np.ones((n, n)))
    sink, shift = np.zeros((n, n)), np.zeros((n, n))
    sink[:, 0] = 1
    shift[0, 0] = 1
    shift[np.arange(1, n), np.arange(n - 1)] = 1
    return {
        "copying": np.eye(n),
        "shifting": shift,
        "sinking": sink,
        "sink-biased": 0.7 * sink + 0.3 * shift,
        "diffuse": causal / causal.sum(-1, keepdims=True),
        "mixed": 0.34 * np.eye(n) + 0.33 * shift + 0.33 * sink,
    }


def test_maps_have_their_roles():
    import torch

    n, patterns = 64, maps(64)
    pattern = torch.tensor(np.stack(list(patterns.values())))[None]
    rows = ap.Rows.from_pattern(pattern)
    means = {}
    for analyzer in (
        ap.SelfAttention(),
        ap.PreviousTokenAttention(),
        ap.SinkScore(),
        ap.IntrinsicTDO(),
        ap.RowEntropy(),
    ):
        analyzer.update(rows)
        means |= {name: value.numpy() for name, value in analyzer.compute().items()}
    found = roles_of(means, np.array([n]), RoleThresholds())
    assert found.role[0].tolist() == list(patterns)
    assert found.representative == {name: (0, i) for i, name in enumerate(patterns) if name != "mixed"}
    assert set(found.role[0]) == set(ROLES)
    assert means["row_entropy"][0, 4] == pytest.approx(uniform_entropy(np.array([n])), rel=1e-9)


def test_thresholds_move_the_roles():
    means = {
        "self_attention": np.array([[0.4, 0.0]]),
        "previous_token_attention": np.array([[0.0, 0.2]]),
        "sink_score": np.array([[0.3, 0.6]]),
        "participation_ratio": np.array([[0.5, 0.2]]),
        "row_entropy": np.array([[0.1, 0.1]]),
    }
    assert roles_of(means, np.array([20]), RoleThresholds()).role.tolist() == [["mixed", "sink-biased"]]
    looser = RoleThresholds(copying=0.4, routing=0.3)
    assert roles_of(means, np.array([20]), looser).role.tolist() == [["copying", "sinking"]]
    with pytest.raises(ValueError, match=r"the threshold sink=1.5 is no share"):
        RoleThresholds(sink=1.5)
