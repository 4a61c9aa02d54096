"""Confidence intervals of any metric, by resampling answers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from attnprobe.metrics.inputs import check_count, warn_undefined
from attnprobe.metrics.rowwise import Metric, RowMetric, batch_of, paired_arrays, row_form, seeded

IntervalMethod = Literal["percentile", "BCa"]

# Above this share of resamples without a value, the interval is worth a warning.
_UNDEFINED_SHARE = 0.05


@dataclass(frozen=True)
class Interval:
    """A value and its confidence interval.

    Attributes:
        estimate: the metric on all answers.
        low, high: ends of the interval, in the units of the metric.
        level: confidence level, in (0, 1).
        undefined: share of resamples on which the metric was NaN, and which the interval leaves out.
    """

    estimate: float
    low: float
    high: float
    level: float
    undefined: float = 0.0


def bootstrap(
    metric: Metric,
    *arrays: ArrayLike,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    method: IntervalMethod = "percentile",
) -> Interval:
    """Confidence interval of `metric(*arrays)` over the answers that might have been drawn instead.

    Answers are resampled with replacement, the entries of one answer staying together. The metrics of this package
    are computed for all resamples at once, ties (a resample is full of them) treated exactly as ever; any other metric
    is called once a resample. To set a keyword of the metric use `functools.partial`.

    A resample on which the metric is NaN, such as one with a single label, is left out: the interval is that of
    the metric where it is defined. `Interval.undefined` says how many there were, and above 5 % there is a warning.

    Args:
        metric: takes the arrays, returns a number.
        *arrays: [answer] each, what the metric takes.
        resamples: number of resamples.
        level: confidence level, in (0, 1).
        seed: of the resamples; the same seed and number of answers give the same resamples.
        method: "percentile", or "BCa": corrected for bias and skewness, at the cost of one more evaluation an answer.

    Returns:
        `Interval`. NaN where the metric is NaN on all answers or on all resamples, and under BCa where it is undefined
        (a metric at its bound, or undefined once some one answer is left out), with a warning.

    Raises:
        ValueError: what the metric raises, arrays that differ in length, fewer than two answers, or a setting out of
            range.

    >>> from attnprobe.metrics import auroc, bootstrap
    >>> found = bootstrap(auroc, [1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1], resamples=200)
    >>> round(found.estimate, 3), found.low <= found.estimate <= found.high, found.level
    (0.889, True, 0.95)

    Source: `scipy.stats.bootstrap`; Efron and Tibshirani 1993, "An Introduction to the Bootstrap".
    """
    check_settings(resamples, level)
    if method not in ("percentile", "BCa"):
        raise ValueError(f'method is {method!r}; give "percentile" or "BCa".')
    data = paired_arrays(*arrays)
    if len(data[0]) < 2:
        raise ValueError("one answer cannot be resampled; give at least two.")
    # The metric checks its arrays here, once for all resamples.
    estimate = float(metric(*data))
    return resampled_interval(row_form(metric), data, estimate, resamples, level, seed, method)


def check_settings(resamples: int, level: float) -> None:
    """Raise a ValueError unless the number of resamples and the level make sense."""
    check_count(resamples, "resamples")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; give a confidence level between 0 and 1, such as 0.95.")


def resampled_interval(
    rows: RowMetric,
    data: list[np.ndarray],
    estimate: float,
    resamples: int,
    level: float,
    seed: int,
    method: IntervalMethod,
) -> Interval:
    """The bootstrap interval of a metric that takes rows, around an estimate that has been computed."""
    if np.isnan(estimate):
        return Interval(estimate, estimate, estimate, level)

    def statistic(*resampled: np.ndarray, axis: int = -1) -> np.ndarray:
        return rows(*resampled)

    settings = dict(vectorized=True, paired=True, axis=-1, confidence_level=level, batch=batch_of(len(data[0])))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # scipy warns where NaN is returned; we say why below.
        warnings.simplefilter("ignore")
        drawn = stats.bootstrap(
            data, statistic, n_resamples=resamples, method="percentile", **settings, **seeded(stats.bootstrap, seed)
        )
        values = drawn.bootstrap_distribution
        defined = values[~np.isnan(values)]
        undefined = 1 - len(defined) / len(values)
        low = high = float("nan")
        if len(defined):
            # No new resamples: scipy makes the interval from those where there is a value.
            kept = replace(drawn, bootstrap_distribution=defined)
            found = stats.bootstrap(data, statistic, n_resamples=0, bootstrap_result=kept, method=method, **settings)
            low, high = (float(end) for end in found.confidence_interval)
    _report(undefined, low, method)
    return Interval(estimate, low, high, level, undefined)


def _report(undefined: float, low: float, method: IntervalMethod) -> None:
    if undefined == 1:
        warn_undefined("the metric is NaN on every resample: there is no interval; give more answers.")
    elif np.isnan(low):
        warn_undefined(f"the {method} interval is not defined here and is NaN; take the percentile method.")
    elif undefined > _UNDEFINED_SHARE:
        warn_undefined(
            f"the metric is NaN on {undefined:.0%} of the resamples, which the interval leaves out; give more answers."
        )
