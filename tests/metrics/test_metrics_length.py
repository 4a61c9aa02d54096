"""Metrics beside the length: pairs of a stratum counted, what cannot change the value, correlations."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.exceptions import UndefinedMetricWarning

from attnprobe.metrics import auroc, length_controlled_auroc, length_correlation
from attnprobe.metrics.length import length_strata

ANSWERS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(1, 9)), min_size=4, max_size=30)
BINS = st.integers(1, 6)
WITHOUT_WARNING = pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")


def columns(answers):
    return [np.array(column, dtype=float) for column in zip(*answers, strict=True)]


@WITHOUT_WARNING
@settings(deadline=None)
@given(ANSWERS, BINS)
def test_pairs_of_a_stratum_counted(answers, bins):
    score, label, length = columns(answers)
    stratum = length_strata(length, bins)
    wins = pairs = 0
    for i in np.flatnonzero(label == 1):
        for j in np.flatnonzero(label == 0):
            if stratum[i] == stratum[j]:
                wins += (score[i] > score[j]) + 0.5 * (score[i] == score[j])
                pairs += 1
    found = length_controlled_auroc(score, label, length, bins)
    assert found.pairs == pairs
    assert found.auroc == pytest.approx(wins / pairs if pairs else math.nan, abs=1e-12, nan_ok=True)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), BINS)
def test_strata_keep_equal_lengths_together_and_order(length, bins):
    length = np.array(length, dtype=float)
    stratum = length_strata(length, bins)
    assert set(stratum) <= set(range(bins))
    for one in np.unique(length):
        assert len(set(stratum[length == one])) == 1
    assert (np.diff(stratum[np.argsort(length)]) >= 0).all()


def test_strata_are_of_equal_size_without_ties():
    assert np.bincount(length_strata(np.arange(20.0), 5)).tolist() == [4] * 5


def test_strata_where_edges_coincide():
    # Six of eight answers have one token: the inner edges at 1/4 and 1/2 both are 1, and bin 1 stays empty.
    assert length_strata(np.array([1.0] * 6 + [2, 3]), 4).tolist() == [0] * 6 + [3, 3]


@WITHOUT_WARNING
@settings(deadline=None)
@given(ANSWERS)
def test_one_bin_is_plain_auroc(answers):
    score, label, length = columns(answers)
    found = length_controlled_auroc(score, label, length, bins=1)
    assert found.auroc == pytest.approx(auroc(score, label), abs=1e-12, nan_ok=True)
    assert found.length_auroc == pytest.approx(auroc(length, label), abs=1e-12, nan_ok=True)


@WITHOUT_WARNING
@settings(deadline=None)
@given(ANSWERS, BINS, st.lists(st.integers(-100, 100), min_size=6, max_size=6))
def test_a_number_added_to_a_stratum_changes_nothing(answers, bins, added):
    score, label, length = columns(answers)
    moved = score + np.array(added)[length_strata(length, bins)]
    np.testing.assert_equal(
        length_controlled_auroc(moved, label, length, bins), length_controlled_auroc(score, label, length, bins)
    )


def test_a_score_that_counts_tokens_falls_to_chance():
    generator = np.random.default_rng(0)
    length = generator.integers(1, 40, 2000)
    label = generator.random(2000) < length / 40
    found = length_controlled_auroc(length + generator.normal(size=2000), label, length, bins=20)
    assert found.length_auroc > 0.8
    assert found.auroc == pytest.approx(0.5, abs=0.06)


def test_no_pairs_have_no_value():
    with pytest.warns(UndefinedMetricWarning, match="no two answers of the same length stratum"):
        found = length_controlled_auroc([1, 2, 3, 4], [0, 0, 1, 1], [1, 1, 9, 9], bins=2)
    assert math.isnan(found.auroc)
    assert found[1:] == (1.0, 0)
    with pytest.warns(UndefinedMetricWarning):
        assert math.isnan(length_controlled_auroc([1, 2], [1, 1], [1, 2]).length_auroc)


@pytest.mark.parametrize("bins", [0, -1, 2.0, True])
def test_bins_are_a_number(bins):
    with pytest.raises(ValueError, match="bins is"):
        length_controlled_auroc([1, 2], [0, 1], [1, 2], bins)


def test_lengths_are_finite_numbers():
    with pytest.raises(ValueError, match="length is infinite at index 1"):
        length_controlled_auroc([1, 2], [0, 1], [1, math.inf])
    with pytest.raises(ValueError, match="length is NaN at index 0"):
        length_correlation([1, 2, 3], [math.nan, 1, 2])
    with pytest.raises(ValueError, match="score is infinite at index 2"):
        length_correlation([1, 2, math.inf], [3, 1, 2])
    with pytest.raises(ValueError, match="at least three"):
        length_correlation([1, 2], [1, 2])


def test_correlations():
    generator = np.random.default_rng(1)
    length = generator.integers(1, 60, 50)
    score = 0.05 * length + generator.normal(size=50)
    found = length_correlation(score, length)
    assert found.pearson == pytest.approx(np.corrcoef(score, length)[0, 1])
    ranks = [stats.rankdata(values) for values in (score, length)]
    assert found.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert 0 < found.pearson_p < 0.05
    assert found.spearman_p < 0.05
    assert length_correlation(np.exp(score), length).spearman == pytest.approx(found.spearman)


@pytest.mark.parametrize(
    ("score", "length", "which"), [([1, 1, 1], [1, 2, 3], "scores"), ([1, 2, 3], [4, 4, 4], "lengths")]
)
def test_constants_have_no_correlation(score, length, which):
    with pytest.warns(UndefinedMetricWarning, match=f"all {which} are the same"):
        assert all(math.isnan(value) for value in length_correlation(score, length))
