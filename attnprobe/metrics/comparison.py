"""Is one score better than another on the same answers?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy import stats

from attnprobe.metrics.inputs import check_count
from attnprobe.metrics.intervals import Interval, bootstrap, check_settings, resampled_interval
from attnprobe.metrics.rejection import prediction_rejection_ratio
from attnprobe.metrics.rowwise import Metric, RowMetric, batch_of, paired_arrays, row_form, seeded

Exchange = Literal["ranks", "scores"]


@dataclass(frozen=True)
class PairedTest:
    """The difference of a metric between two scores of the same answers.

    Attributes:
        value_a, value_b: the metric of each score.
        difference: a - b.
        low, high: bootstrap interval of the difference (percentile).
        level: its confidence level.
        p_value: two-sided, of the permutation test.
        undefined: share of resamples that the interval leaves out, as in `Interval`.
    """

    value_a: float
    value_b: float
    difference: float
    low: float
    high: float
    level: float
    p_value: float
    undefined: float = 0.0


def paired_test(
    metric: Metric,
    score_a: Float[np.ndarray, "answer"] | ArrayLike,
    score_b: Float[np.ndarray, "answer"] | ArrayLike,
    target: Float[np.ndarray, "answer"] | ArrayLike,
    *more: ArrayLike,
    resamples: int = 2000,
    permutations: int = 9999,
    level: float = 0.95,
    seed: int = 0,
    exchange: Exchange = "ranks",
) -> PairedTest:
    """Compare `metric(score_a, target, *more)` with `metric(score_b, target, *more)` on the same answers.

    The interval comes from resampling answers, both scores of an answer staying together.

    The p-value is that of a permutation test: for every answer a coin decides whether its two scores change places,
    and the difference of the metric is computed anew. Scores of two methods have scales of their own
    (log-probabilities, counts), and swapping them as they are would test whether the scales are the same. Each score
    is therefore replaced by its ranks over all answers first, which leaves metrics of order (PRR, AUROC, average
    precision) as they are. The hypothesis tested is that the two methods order the answers equally well in this
    sense: given the target, the pair of ranks of an answer is exchangeable. The test would be exact if ranks came from
    the population; they come from the same answers, which matters little from some tens of answers on.

    Args:
        metric: takes a score and the target (and more), returns a number.
        score_a, score_b: [answer].
        target: [answer], such as quality or label.
        *more: [answer] each, what else the metric takes, such as lengths.
        resamples, level, seed: as in `bootstrap`; the seed also sets the swaps.
        permutations: number of random swaps; all 2^n are taken where they are no more than that. The p-value of
            random swaps is never below 2 / (permutations + 1).
        exchange: "ranks"; or "scores", for two scores on the same scale and a metric that reads their values.

    Returns:
        `PairedTest`; NaN where the metric is NaN on all answers, with the metric's warning.

    Raises:
        ValueError: what the metric raises, arrays that differ in length, a setting out of range, or
            exchange="ranks" with a metric that changes when scores are replaced by their ranks.

    >>> from attnprobe.metrics import auroc, paired_test
    >>> label = [0, 0, 0, 0, 1, 1, 1, 1]
    >>> found = paired_test(auroc, [1, 2, 3, 4, 5, 6, 7, 8], [8, 1, 7, 2, 6, 3, 5, 4], label)
    >>> found.difference, round(found.p_value, 3)
    (0.5, 0.125)

    Source: permuting ranks of paired scores is the test of Venkatraman and Begg 1996 (Biometrika 83) with the statistic
    of Bandos, Rockette and Gur 2005 (Statistics in Medicine 24); `scipy.stats.permutation_test`.
    """
    check_settings(resamples, level)
    check_count(permutations, "permutations")
    if exchange not in ("ranks", "scores"):
        raise ValueError(f'exchange is {exchange!r}; give "ranks" or "scores".')
    names = ("score_a", "score_b", "target", *(f"array_{number}" for number in range(4, len(more) + 4)))
    a, b, *rest = paired_arrays(score_a, score_b, target, *more, names=names)
    if len(a) < 2:
        raise ValueError("one answer cannot be compared; give at least two.")
    value_a, value_b = float(metric(a, *rest)), float(metric(b, *rest))
    rows = row_form(metric)
    interval = resampled_interval(
        _difference(rows), [a, b, *rest], value_a - value_b, resamples, level, seed, "percentile"
    )
    p_value = float("nan")
    if not np.isnan(value_a - value_b):
        if exchange == "ranks":
            a, b = _ranks(metric, value_a, a, rest), _ranks(metric, value_b, b, rest)
        p_value = _swap_test(rows, [a, b], rest, permutations, seed)
    return PairedTest(
        value_a, value_b, value_a - value_b, interval.low, interval.high, level, p_value, interval.undefined
    )


def holm_correction(p_values: Float[np.ndarray, "test"] | ArrayLike) -> Float[np.ndarray, "test"]:
    """p-values adjusted so that rejecting those below alpha errs anywhere with probability alpha at most.

        p_holm(i) = max_{j <= i} min(1, (m - j + 1) p(j)),      p(1) <= ... <= p(m)

    Args:
        p_values: [test], in [0, 1]; NaN stands for a test that was not made and is not counted.

    Returns:
        [test], in the order given; NaN stays NaN.

    Raises:
        ValueError: not one-dimensional, or a value outside of [0, 1].

    >>> from attnprobe.metrics import holm_correction
    >>> holm_correction([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.06, 0.06]

    Source: Holm 1979 (Scandinavian Journal of Statistics 6).
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1:
        raise ValueError(f"p_values has shape {p.shape}; give one value a test, in one dimension.")
    outside = (p < 0) | (p > 1)
    if outside.any():
        raise ValueError(f"p_values is outside of [0, 1] at index {int(outside.argmax())}; give probabilities.")
    made = np.flatnonzero(~np.isnan(p))
    order = made[np.argsort(p[made], kind="stable")]
    adjusted = np.full(len(p), np.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return adjusted


def compare(
    scores: Mapping[str, ArrayLike] | pd.DataFrame,
    target: Float[np.ndarray, "answer"] | ArrayLike,
    *more: ArrayLike,
    metric: Metric = prediction_rejection_ratio,
    baseline: str | None = None,
    resamples: int = 2000,
    permutations: int = 9999,
    level: float = 0.95,
    seed: int = 0,
    exchange: Exchange = "ranks",
) -> pd.DataFrame:
    """A metric of many scores on the same answers, each beside a baseline.

    Args:
        scores: name -> [answer]; a DataFrame with a column a method will do.
        target, *more: what the metric takes after the score.
        metric: higher = better or not, as it is.
        baseline: the name of the score to compare all others with; without one nothing is compared.
        resamples, permutations, level, seed, exchange: as in `paired_test`. All methods see the same resamples.

    Returns:
        A DataFrame with a row a method, in the order given, and the columns

        - method, value, and low, high: the interval of the value (percentile bootstrap);
        - difference, difference_low, difference_high: to the baseline, and its interval;
        - p: of `paired_test`; p_holm: the same corrected for the number of methods compared.

        What is not compared (anything without a baseline, and the baseline itself) is NaN.

    Raises:
        ValueError: no scores, a baseline that is not among them, or as `paired_test`; the message names the method.
        TypeError: scores without names.

    >>> from attnprobe.metrics import compare
    >>> table = compare({"good": [1, 2, 3, 4], "bad": [4, 3, 2, 1]}, [1.0, 0.9, 0.2, 0.1], baseline="bad")
    >>> table[["method", "value", "difference"]].round(3).values.tolist()
    [['good', 1.0, 2.0], ['bad', -1.0, nan]]

    Source: `bootstrap`, `paired_test`, `holm_correction`.
    """
    if not hasattr(scores, "items"):
        raise TypeError(f"scores is a {type(scores).__name__}: give a name and an array for each, {{name: scores}}.")
    if not len(scores):
        raise ValueError("there are no scores to compare; give a name and an array for each.")
    if baseline is not None and baseline not in scores:
        raise ValueError(f"the baseline {baseline!r} is not among the scores ({', '.join(map(str, scores))}).")
    interval = partial(bootstrap, metric, resamples=resamples, level=level, seed=seed)
    test = partial(
        paired_test, metric, resamples=resamples, permutations=permutations, level=level, seed=seed, exchange=exchange
    )
    rows = []
    for name, score in scores.items():
        try:
            own = interval(score, target, *more)
            against = None
            if baseline is not None and name != baseline:
                against = test(score, scores[baseline], target, *more)
        except ValueError as error:
            raise ValueError(f"method {name!r}: {error}") from error
        rows.append(_row(str(name), own, against))
    table = pd.DataFrame(rows)
    return table.assign(p_holm=holm_correction(table["p"].to_numpy()))


def _row(name: str, own: Interval, against: PairedTest | None) -> dict[str, str | float]:
    nothing = float("nan")
    return {
        "method": name,
        "value": own.estimate,
        "low": own.low,
        "high": own.high,
        "difference": against.difference if against else nothing,
        "difference_low": against.low if against else nothing,
        "difference_high": against.high if against else nothing,
        "p": against.p_value if against else nothing,
    }


def _difference(rows: RowMetric) -> RowMetric:
    def difference(a: np.ndarray, b: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        return rows(a, *rest) - rows(b, *rest)

    return difference


def _ranks(metric: Metric, value: float, score: np.ndarray, rest: list[np.ndarray]) -> Float[np.ndarray, "answer"]:
    ranks = stats.rankdata(score)
    ranked = float(metric(ranks, *rest))
    if not np.isclose(ranked, value, rtol=1e-9, atol=1e-12):
        raise ValueError(
            f"the metric is {value:.6g} on a score and {ranked:.6g} on its ranks, so that ranks cannot stand for the "
            f'scores; if both scores are on the same scale, pass exchange="scores".'
        )
    return ranks


def _swap_test(rows: RowMetric, pair: list[np.ndarray], rest: list[np.ndarray], permutations: int, seed: int) -> float:
    def statistic(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        # Targets stay where they are; only the two scores of an answer change places.
        fixed = [np.broadcast_to(array, a.shape) for array in rest]
        return rows(a, *fixed) - rows(b, *fixed)

    found = stats.permutation_test(
        pair,
        statistic,
        permutation_type="samples",
        vectorized=True,
        n_resamples=permutations,
        batch=batch_of(len(pair[0])),
        alternative="two-sided",
        axis=-1,
        **seeded(stats.permutation_test, seed),
    )
    return float(found.pvalue)
