"""AUROCs of many features at once against scikit-learn and against resamples written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from attnprobe.metrics import length_controlled_auroc
from attnprobe.metrics.length import length_strata
from attnprobe.polarity.ranking import (
    aurocs,
    cluster_weights,
    null_aurocs,
    pair_count,
    permuted_labels,
    resampled_aurocs,
    resampled_within,
    stratum_ranks,
)


def made(seed, n=40, n_features=6, ties=True):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(n, n_features))
    if ties:
        values[:, ::2] = np.round(values[:, ::2])
    label = generator.permutation(np.arange(n) % 2)
    return values, label, generator.integers(1, 12, n).astype(float), generator.integers(0, n // 3, n)


def by_pairs(x, label, stratum):
    """AUROC written out over pairs; NaN without any."""
    wins = [
        1.0 if x[i] > x[j] else 0.5 if x[i] == x[j] else 0.0
        for i in np.flatnonzero(label == 1)
        for j in np.flatnonzero(label == 0)
        if stratum[i] == stratum[j]
    ]
    return np.mean(wins) if wins else np.nan


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_plain_auroc_is_that_of_scikit_learn(seed):
    values, label, _, _ = made(seed)
    one = np.zeros(len(label), dtype=int)
    found = aurocs(stratum_ranks(values, one), label, one)
    np.testing.assert_allclose(found, [roc_auc_score(label, x) for x in values.T], atol=1e-12)


@given(st.integers(0, 10_000), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_length_controlled_auroc_is_that_of_the_metrics(seed, bins):
    values, label, length, _ = made(seed)
    stratum = length_strata(length, bins)
    found = aurocs(stratum_ranks(values, stratum), label, stratum)
    expected = [length_controlled_auroc(x, label, length, bins) for x in values.T]
    np.testing.assert_allclose(found, [one.auroc for one in expected], atol=1e-12)
    assert pair_count(label, stratum) == expected[0].pairs


def test_no_pairs_is_nan():
    stratum = np.array([0, 0, 1])
    found = aurocs(stratum_ranks(np.zeros((3, 2)), stratum), np.array([0, 0, 1]), stratum)
    assert np.isnan(found).all()


def test_permuted_labels_stay_in_their_blocks_and_reach_every_order():
    label, block = np.array([0, 1, 1, 0, 1, 0]), np.array([2, 0, 2, 0, 2, 1])
    rows = np.concatenate(list(permuted_labels(label, block, 3000, seed=1)))
    assert rows.shape == (3000, 6)
    for b in range(3):
        assert (rows[:, block == b].sum(1) == label[block == b].sum()).all()
    orders, counts = np.unique(rows, axis=0, return_counts=True)
    assert len(orders) == 3 * 2  # three places of one 0 in block 2, two in block 0
    assert counts.min() > 3000 / 6 * 0.8


def test_null_is_the_auroc_of_every_permuted_row():
    values, label, length, group = made(3)
    for stratum, block in ((np.zeros(40, int), group), (length_strata(length, 3),) * 2):
        null = null_aurocs(stratum_ranks(values, stratum), label, stratum, block, 20, seed=4)
        rows = np.concatenate(list(permuted_labels(label, block, 20, seed=4)))
        expected = [[by_pairs(x, row, stratum) for x in values.T] for row in rows]
        np.testing.assert_allclose(null, expected, atol=1e-6)


@pytest.mark.parametrize("bins", [1, 4])
def test_resampled_is_the_auroc_of_the_answers_drawn(bins):
    values, label, length, group = made(5)
    stratum = length_strata(length, bins)
    weights = cluster_weights(group, 12, seed=6)
    found = np.array(list(resampled_aurocs(values, label, stratum, weights)))
    for r in range(12):
        drawn = np.repeat(np.arange(40), weights[:, r].astype(int))
        expected = [by_pairs(x[drawn], label[drawn], stratum[drawn]) for x in values.T]
        np.testing.assert_allclose(found[:, r], expected, atol=1e-6)


def test_resampled_without_a_pair_is_nan():
    values, label = np.array([[1.0], [2.0]]), np.array([0, 1])
    found = next(resampled_aurocs(values, label, np.zeros(2, int), np.array([[1.0, 2.0], [1.0, 0.0]])))
    np.testing.assert_array_equal(found, [1.0, np.nan])


def test_questions_drawn_twice_are_two_questions():
    values, label, _, group = made(7)
    weights = cluster_weights(group, 12, seed=8)
    found = resampled_within(stratum_ranks(values, group), label, group, weights)
    for r in range(12):
        copies = [
            (np.flatnonzero(group == g), (g, copy))
            for g in np.unique(group)
            for copy in range(int(weights[group == g][0, r]))
        ]
        drawn = np.concatenate([members for members, _ in copies])
        stratum = np.concatenate([np.full(len(members), i) for i, (members, _) in enumerate(copies)])
        expected = [by_pairs(x[drawn], label[drawn], stratum) for x in values.T]
        np.testing.assert_allclose(found[r], expected, atol=1e-6)


def test_cluster_weights_draw_whole_groups():
    group = np.array([4, 4, 9, 1, 9, 9])
    weights = cluster_weights(group, 500, seed=0)
    assert (weights[0] == weights[1]).all()
    assert (weights[[0, 2, 3]].sum(0) == 3).all()
    assert abs(weights[3].mean() - 1) < 0.15
