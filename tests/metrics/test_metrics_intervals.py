"""Bootstrap intervals: coverage, what resampling by hand gives, NaN, seeds."""

import functools
import math
import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn.exceptions import UndefinedMetricWarning

from attnprobe.metrics import (
    auroc,
    average_precision,
    bootstrap,
    length_controlled_auroc,
    prediction_rejection_ratio,
)


def answers(n, seed=0, signal=1.0):
    generator = np.random.default_rng(seed)
    label = (np.arange(n) % 2).astype(float)
    return generator.normal(size=n) + signal * label, label


@pytest.mark.parametrize("metric", [auroc, average_precision, prediction_rejection_ratio])
@pytest.mark.parametrize("method", ["percentile", "BCa"])
def test_the_row_form_gives_what_the_metric_gives(metric, method):
    score, label = answers(24)
    score = score.round(1)
    # A lambda is not known to have a row form, and is called once a resample.
    slow = bootstrap(lambda s, q: metric(s, q), score, label, resamples=60, method=method)
    fast = bootstrap(metric, score, label, resamples=60, method=method)
    for field in ("estimate", "low", "high"):
        assert getattr(fast, field) == pytest.approx(getattr(slow, field), abs=1e-9)


def test_percentiles_of_resamples_drawn_by_hand():
    score, label = answers(40)
    found = bootstrap(auroc, score, label, resamples=4000, level=0.9)
    generator = np.random.default_rng(99)
    by_hand = [auroc(score[i], label[i]) for i in generator.integers(0, 40, (1000, 40))]
    assert found.estimate == auroc(score, label)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(by_hand, [0.05, 0.95])), abs=0.02)
    assert found.level == 0.9


@pytest.mark.parametrize("method", ["percentile", "BCa"])
def test_coverage(method):
    # Two normals one apart: AUROC = Phi(1 / sqrt 2).
    true = stats.norm.cdf(1 / math.sqrt(2))
    runs = 200
    hits = 0
    for seed in range(runs):
        score, label = answers(80, seed=seed)
        found = bootstrap(auroc, score, label, resamples=300, level=0.9, seed=seed, method=method)
        hits += found.low <= true <= found.high
    # 0.9 of 200 has a standard error of 0.021; percentile intervals at n = 80 are a little narrow.
    assert 0.82 <= hits / runs <= 0.97


def test_a_seed_makes_the_interval():
    score, label = answers(30)
    one, same, other = (bootstrap(auroc, score, label, resamples=200, seed=seed) for seed in (3, 3, 4))
    assert one == same
    assert one != other


def test_the_global_generator_is_left_alone():
    state = np.random.get_state()[1].copy()
    bootstrap(auroc, *answers(30), resamples=20)
    assert (np.random.get_state()[1] == state).all()


def test_keywords_by_partial():
    score, quality = answers(30)
    metric = functools.partial(prediction_rejection_ratio, max_rejection=1.0)
    found = bootstrap(metric, score, quality, resamples=100)
    assert found.estimate == prediction_rejection_ratio(score, quality, max_rejection=1.0)
    slow = bootstrap(lambda s, q: metric(s, q), score, quality, resamples=100)
    assert found.low == pytest.approx(slow.low, abs=1e-9)


def test_a_wider_level_is_wider():
    score, label = answers(50)
    narrow, wide = (bootstrap(auroc, score, label, level=level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_any_metric_and_any_arrays():
    score, label = answers(30)
    length = np.arange(30) % 7
    found = bootstrap(lambda s, y, n: length_controlled_auroc(s, y, n, 2).auroc, score, label, length, resamples=50)
    assert found.low <= found.estimate <= found.high
    words = np.array(["yes", "no"] * 15)
    agreement = bootstrap(lambda a, b: float(np.mean((a == "yes") == (b == 0))), words, label, resamples=50)
    assert (agreement.low, agreement.high) == (1.0, 1.0)
    assert bootstrap(auroc, score.tolist(), label == 1, resamples=50) == bootstrap(auroc, score, label, resamples=50)


def test_resamples_without_a_value_are_left_out():
    # Two of 20 are positive: (18/20)^20 = 12 % of the resamples have none.
    score, label = np.arange(20.0), np.zeros(20)
    label[[3, 17]] = 1
    with pytest.warns(UndefinedMetricWarning, match="NaN on 1[0-9]% of the resamples"):
        found = bootstrap(auroc, score, label)
    assert found.undefined == pytest.approx(0.9**20, abs=0.03)
    generator = np.random.default_rng(5)
    drawn = [i for i in generator.integers(0, 20, (700, 20)) if label[i].any()]
    by_hand = np.quantile([auroc(score[i], label[i]) for i in drawn], [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx(tuple(by_hand), abs=0.04)


def test_few_resamples_without_a_value_go_unsaid_but_are_counted():
    score, label = np.arange(40.0), np.zeros(40)
    label[[3, 17, 20, 30]] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = bootstrap(auroc, score, label)
    assert found.undefined == pytest.approx(0.9**40, abs=0.01)
    assert found.undefined > 0


def test_a_metric_without_a_value_has_no_interval():
    with pytest.warns(UndefinedMetricWarning, match="all labels are 1"):
        found = bootstrap(auroc, [1, 2, 3], [1, 1, 1])
    assert all(math.isnan(value) for value in (found.estimate, found.low, found.high))
    seen = []

    def once(values):
        seen.append(values)
        return 1.0 if len(seen) == 1 else math.nan

    with pytest.warns(UndefinedMetricWarning, match="NaN on every resample"):
        assert math.isnan(bootstrap(once, [1, 2, 3], resamples=10).low)


def test_bca_at_the_bound_says_so():
    score, label = np.arange(20.0), np.repeat([0, 1], 10)
    with pytest.warns(UndefinedMetricWarning, match="take the percentile method"):
        assert math.isnan(bootstrap(auroc, score, label, method="BCa", resamples=100).low)
    found = bootstrap(auroc, score, label, resamples=100)
    assert (found.low, found.high) == (1.0, 1.0)


def test_bca_corrects_for_skewness():
    # The exponential mean: the interval reaches further up than down.
    values = stats.expon.ppf((np.arange(30) + 0.5) / 30)
    mean = lambda x: float(np.mean(x))  # noqa: E731
    percentile, bca = (bootstrap(mean, values, method=method) for method in ("percentile", "BCa"))
    assert bca.high > percentile.high
    assert bca.low > percentile.low


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap(auroc), "no array to resample"),
        (lambda: bootstrap(auroc, [1, 2], [1, 0, 1]), r"different lengths \(array_1 2, array_2 3\)"),
        (lambda: bootstrap(auroc, [1, math.nan], [1, 0]), "score is NaN at index 1"),
        (lambda: bootstrap(auroc, [1], [1]), "one answer cannot be resampled"),
        (lambda: bootstrap(auroc, [1, 2], [1, 0], resamples=0), "resamples is 0"),
        (lambda: bootstrap(auroc, [1, 2], [1, 0], level=95), "level is 95"),
        (lambda: bootstrap(auroc, [1, 2], [1, 0], method="bca"), "method is 'bca'"),
    ],
)
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
