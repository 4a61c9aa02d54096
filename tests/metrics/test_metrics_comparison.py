"""Paired tests: every swap enumerated, the level of the test, Holm's correction, the table."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.exceptions import UndefinedMetricWarning

from attnprobe.metrics import (
    auroc,
    average_precision,
    bootstrap,
    compare,
    holm_correction,
    length_controlled_auroc,
    paired_test,
    prediction_rejection_ratio,
)

QUICK = dict(resamples=100, permutations=199)


def two_scores(n, seed=0, a=1.0, b=1.0):
    """A label, and two scores that share noise and see the label with signals a and b."""
    generator = np.random.default_rng(seed)
    label = np.arange(n) % 2
    shared = generator.normal(size=n)
    first, second = (signal * label + 0.5 * shared + generator.normal(size=n) for signal in (a, b))
    return first, second, label


@pytest.mark.parametrize("metric", [auroc, average_precision, prediction_rejection_ratio])
def test_every_swap_enumerated(metric):
    a, b, label = two_scores(8)
    ranks = np.stack([stats.rankdata(a), stats.rankdata(b)])
    observed = metric(a, label) - metric(b, label)
    differences = []
    for swaps in itertools.product([0, 1], repeat=8):
        swapped = np.where(np.array(swaps) == 1, ranks[::-1], ranks)
        differences.append(metric(swapped[0], label) - metric(swapped[1], label))
    expected = np.mean(np.abs(differences) >= abs(observed) - 1e-12)
    found = paired_test(metric, a, b, label, resamples=10)
    assert found.difference == pytest.approx(observed)
    assert found.p_value == pytest.approx(expected)


def test_the_test_holds_its_level():
    # Two equally good scores on scales of their own: p < 0.1 comes one time in ten.
    p_values = []
    for seed in range(150):
        a, b, label = two_scores(60, seed=seed)
        p_values.append(paired_test(auroc, np.exp(a), 100 + b, label, resamples=2, permutations=199).p_value)
    # Standard error 0.024.
    assert 0.03 <= np.mean(np.array(p_values) <= 0.1) <= 0.18


def test_a_difference_is_found():
    a, b, label = two_scores(150, a=2.0, b=0.3)
    found = paired_test(prediction_rejection_ratio, -a, -b, label)
    assert found.p_value < 0.01
    assert 0 < found.low < found.difference < found.high
    back = paired_test(prediction_rejection_ratio, -b, -a, label)
    assert back.difference == -found.difference
    assert back.p_value == pytest.approx(found.p_value, abs=0.01)


def test_the_interval_is_that_of_paired_resamples():
    a, b, label = two_scores(60)
    found = paired_test(auroc, a, b, label, **QUICK)
    slow = bootstrap(lambda s, t, y: auroc(s, y) - auroc(t, y), a, b, label, resamples=100)
    assert (found.low, found.high) == pytest.approx((slow.low, slow.high), abs=1e-9)


def test_scales_do_not_matter():
    a, b, label = two_scores(40)
    one = paired_test(auroc, a, b, label, **QUICK)
    other = paired_test(auroc, np.exp(a), 1e6 * b - 3, label, **QUICK)
    assert one == other


def test_a_score_against_itself():
    a, _, label = two_scores(40)
    found = paired_test(auroc, a, a, label, **QUICK)
    assert (found.difference, found.low, found.high, found.p_value) == (0, 0, 0, 1)


def test_metrics_that_read_values_ask_for_a_common_scale():
    def brier(score, label):
        return float(np.mean((score - label) ** 2))

    a, b, label = two_scores(10)
    a, b = (1 / (1 + np.exp(-score)) for score in (a, b))
    with pytest.raises(ValueError, match='pass exchange="scores"'):
        paired_test(brier, a, b, label, **QUICK)
    found = paired_test(brier, a, b, label, exchange="scores", resamples=10)
    # The difference is a mean over answers, and a swap turns the sign of one answer's.
    terms = (a - label) ** 2 - (b - label) ** 2
    signs = np.array(list(itertools.product([-1, 1], repeat=10)))
    expected = np.mean(np.abs((signs * terms).mean(1)) >= abs(terms.mean()) - 1e-12)
    assert found.p_value == pytest.approx(expected)


def test_more_arrays_reach_the_metric():
    a, b, label = two_scores(40)
    length = np.arange(40) % 5
    metric = lambda s, y, n: length_controlled_auroc(s, y, n, 2).auroc  # noqa: E731
    found = paired_test(metric, a, b, label, length, resamples=20, permutations=20)
    assert found.value_a == metric(a, label, length)
    assert 0 < found.p_value <= 1


def test_no_value_no_test():
    with pytest.warns(UndefinedMetricWarning):
        found = paired_test(auroc, [1, 2, 3], [3, 2, 1], [1, 1, 1])
    assert math.isnan(found.p_value)
    assert math.isnan(found.low)


def test_a_seed_makes_the_test():
    a, b, label = two_scores(40)
    assert paired_test(auroc, a, b, label, seed=1, **QUICK) == paired_test(auroc, a, b, label, seed=1, **QUICK)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm(p_values):
    adjusted = holm_correction(p_values)
    m = len(p_values)
    order = sorted(range(m), key=lambda i: p_values[i])
    for place, i in enumerate(order):
        expected = max(min(1, (m - j) * p_values[order[j]]) for j in range(place + 1))
        assert adjusted[i] == pytest.approx(expected)
    assert (adjusted >= np.array(p_values)).all()


def test_holm_does_not_count_what_was_not_tested():
    np.testing.assert_allclose(holm_correction([0.01, math.nan, 0.04]), [0.02, math.nan, 0.04])
    with pytest.raises(ValueError, match=r"outside of \[0, 1\] at index 1"):
        holm_correction([0.1, 1.5])


def test_the_table():
    a, b, label = two_scores(60, a=2.0, b=0.2)
    scores = {"SAUQ": -a, "noise": np.random.default_rng(9).normal(size=60), "Perplexity": -b}
    table = compare(scores, label, baseline="Perplexity", **QUICK)
    assert table.columns.tolist() == [
        *("method", "value", "low", "high"),
        *("difference", "difference_low", "difference_high", "p", "p_holm"),
    ]
    assert table["method"].tolist() == ["SAUQ", "noise", "Perplexity"]
    by_method = table.set_index("method")
    assert by_method.loc["Perplexity", "difference":].isna().all()
    for name, score in scores.items():
        own = bootstrap(prediction_rejection_ratio, score, label, resamples=100)
        assert by_method.loc[name, ["value", "low", "high"]].tolist() == [own.estimate, own.low, own.high]
    for name in ("SAUQ", "noise"):
        test = paired_test(prediction_rejection_ratio, scores[name], scores["Perplexity"], label, **QUICK)
        found = by_method.loc[name, ["difference", "difference_low", "difference_high", "p"]].tolist()
        assert found == [test.difference, test.low, test.high, test.p_value]
    np.testing.assert_allclose(by_method["p_holm"], holm_correction(by_method["p"]))
    pd.testing.assert_frame_equal(table, compare(pd.DataFrame(scores), label, baseline="Perplexity", **QUICK))


def test_a_table_without_a_baseline():
    a, b, label = two_scores(40)
    table = compare({"a": a, "b": b}, label, metric=auroc, **QUICK)
    assert table["value"].tolist() == [auroc(a, label), auroc(b, label)]
    assert table.loc[:, "difference":].isna().all(axis=None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare({}, [1, 0]), "no scores"),
        (lambda: compare({"a": [1, 2]}, [1, 0], baseline="b"), r"baseline 'b' is not among the scores \(a\)"),
        (lambda: compare({"a": [1, math.nan]}, [1, 0], metric=auroc), "method 'a': score is NaN at index 1"),
        (
            lambda: paired_test(auroc, [1, 2], [1, 2, 3], [1, 0]),
            r"\(score_a 2, score_b 3, target 2\)",
        ),
        (lambda: paired_test(auroc, [1, 2], [1, 2], [1, 0], permutations=0), "permutations is 0"),
        (lambda: paired_test(auroc, [1, 2], [1, 2], [1, 0], exchange="rank"), "exchange is 'rank'"),
        (lambda: paired_test(auroc, [1], [1], [1]), "one answer cannot be compared"),
    ],
)
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
