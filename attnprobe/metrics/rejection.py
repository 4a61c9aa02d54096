"""Prediction rejection: how much better the answers get when the least certain ones are left out.

All answers are ordered by uncertainty, and the quality of the k most certain is averaged, for k = n, n-1, ...,
n-m+1 with m = int(max_rejection n). Among equally uncertain answers no order is given, so every quantity is the
exact expectation over all orders of them: a part of a tied run counts with the mean quality of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from attnprobe.metrics.inputs import answer_values, check_same_length, warn_undefined
from attnprobe.metrics.ties import run_means, tie_bounds


@dataclass(frozen=True, eq=False)
class RejectionCurve:
    """Mean quality of the answers kept, in the units of the quality, as more and more are rejected.

    Attributes:
        rejected: [point] fraction of answers rejected: 0, 1/n, ..., (m-1)/n.
        quality: [point] mean quality of the kept when the least certain go first.
        oracle: [point] the same when the worst go first.
        random: [point] the same in expectation when any go: the mean quality of all.
    """

    rejected: Float[np.ndarray, "point"]
    quality: Float[np.ndarray, "point"]
    oracle: Float[np.ndarray, "point"]
    random: Float[np.ndarray, "point"]


def prediction_rejection_ratio(
    uncertainty: Float[np.ndarray, "answer"] | ArrayLike,
    quality: Float[np.ndarray, "answer"] | ArrayLike,
    max_rejection: float = 0.5,
) -> float:
    """How far rejection by uncertainty gets from rejection at random (0) to rejection by an oracle (1).

        PRR = (S(uncertainty) - S(random)) / (S(oracle) - S(random))
        S(order) = 1/m sum_{k=n-m+1..n} mean quality of the first k answers in the order

    S(random) is the mean quality: the exact expectation. The value is at most 1, and negative where the certain
    answers are the worse ones. It does not change under increasing maps of the uncertainty, nor when the quality
    is shifted or scaled.

    Args:
        uncertainty: [answer], higher = less certain; only the order counts, so infinities are fine (inf is the
            least certain of all, and answers at inf are tied).
        quality: [answer], finite, higher = better; graded or 0 and 1.
        max_rejection: in (0, 1], the largest fraction of answers to reject.

    Returns:
        A float; NaN, with a warning, where all answers are equally good.

    Raises:
        ValueError: a NaN, an infinite quality, lengths that differ, a max_rejection out of range, or so few
            answers that nothing could be rejected: int(max_rejection n) must be at least 2, because the first
            point of the curve keeps all answers whatever the order.

    >>> from attnprobe.metrics import prediction_rejection_ratio
    >>> prediction_rejection_ratio([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 0])
    1.0
    >>> round(prediction_rejection_ratio([0.1, 0.2, 0.4, 0.3], [1, 0, 0, 1], max_rejection=1.0), 4)
    0.5714

    Source: the prediction rejection ratio of Malinin and Gales (arXiv 2002.07650), as LM-Polygraph (arXiv
    2311.07383) cuts it at max_rejection. Two differences are on purpose: ties are averaged over, where
    LM-Polygraph takes the order its sort happens to leave, and the random baseline is exact, where it is the mean
    of 1000 shuffles there.
    """
    uncertainty, quality = _checked(uncertainty, quality)
    if _points(len(quality), max_rejection) < 2:
        raise ValueError(
            f"{len(quality)} answers are too few to reject any of them at max_rejection {max_rejection}; "
            f"give at least {_answers_needed(max_rejection)}."
        )
    ratio = float(ratio_rows(uncertainty, quality, max_rejection))
    if np.isnan(ratio):
        warn_undefined("all answers have the same quality, so that no order is better than another: PRR is NaN.")
    return ratio


def rejection_curve(
    uncertainty: Float[np.ndarray, "answer"] | ArrayLike,
    quality: Float[np.ndarray, "answer"] | ArrayLike,
    max_rejection: float = 0.5,
) -> RejectionCurve:
    """The curves behind `prediction_rejection_ratio`, for a plot.

    Args:
        uncertainty, quality, max_rejection: as in `prediction_rejection_ratio`.

    Returns:
        `RejectionCurve` of m = int(max_rejection n) points. The mean height of `quality` over `random`, divided by
        that of `oracle` over `random`, is the PRR.

    Raises:
        ValueError: as `prediction_rejection_ratio`; one point is enough here.

    >>> from attnprobe.metrics import rejection_curve
    >>> curve = rejection_curve([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 0], max_rejection=1.0)
    >>> curve.rejected.tolist(), curve.quality.round(2).tolist()
    ([0.0, 0.25, 0.5, 0.75], [0.5, 0.67, 1.0, 1.0])

    Source: as `prediction_rejection_ratio`.
    """
    uncertainty, quality = _checked(uncertainty, quality)
    n = len(quality)
    points = _points(n, max_rejection)
    if not points:
        raise ValueError(
            f"a curve up to max_rejection {max_rejection} has no point for {n} answers; "
            f"give more answers, or raise max_rejection."
        )
    order = np.argsort(uncertainty, kind="stable")
    return RejectionCurve(
        rejected=np.arange(points) / n,
        quality=_kept_means(run_means(quality[order], uncertainty[order]), points),
        oracle=_kept_means(np.sort(quality)[::-1], points),
        random=np.full(points, quality.mean()),
    )


def ratio_rows(
    uncertainty: Float[np.ndarray, "*row answer"],
    quality: Float[np.ndarray, "*row answer"],
    max_rejection: float = 0.5,
) -> Float[np.ndarray, "*row"]:
    """PRR of every row; NaN where a row has none. Nothing is checked.

    S is linear in the quality: the answer at place i of the order has the weight

        w_i = 1/m sum_{k >= i, k > n-m} 1/k

    and in expectation over the orders of a tied run each of its answers has the mean weight of its places.
    """
    n = quality.shape[-1]
    points = _points(n, max_rejection)
    if points < 2:
        return np.full(quality.shape[:-1], np.nan)
    weight = _place_weights(n, points)
    order = np.argsort(uncertainty, axis=-1)
    first, last = tie_bounds(np.take_along_axis(uncertainty, order, axis=-1))
    cumulative = np.concatenate([[0.0], np.cumsum(weight)])
    shared = (cumulative[last + 1] - cumulative[first]) / (last + 1 - first)
    # Without a tie the weight as it is, so that the order of the oracle gets 1 to the last digit.
    tied_weight = np.where(first == last, weight, shared)
    scaled = _scaled(quality)
    # S(random) is the mean, so that 1/n off every weight takes it off both scores.
    score = ((tied_weight - 1 / n) * np.take_along_axis(scaled, order, axis=-1)).sum(-1)
    oracle = ((weight - 1 / n) * np.sort(scaled, axis=-1)[..., ::-1]).sum(-1)
    return score / oracle


def _checked(uncertainty: ArrayLike, quality: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    order, good = answer_values(uncertainty, "uncertainty", infinite=True), answer_values(quality, "quality")
    check_same_length(uncertainty=order, quality=good)
    return order, good


def _points(n: int, max_rejection: float) -> int:
    if isinstance(max_rejection, bool) or not isinstance(max_rejection, Real) or not 0 < max_rejection <= 1:
        raise ValueError(f"max_rejection is {max_rejection!r}; give a fraction of the answers, in (0, 1].")
    return int(max_rejection * n)


def _answers_needed(max_rejection: float) -> int:
    n = int(2 / max_rejection)
    return n if _points(n, max_rejection) >= 2 else n + 1


def _place_weights(n: int, points: int) -> Float[np.ndarray, "answer"]:
    kept = np.arange(1, n + 1)
    share = np.where(kept > n - points, 1 / kept, 0.0) / points
    return np.cumsum(share[::-1])[::-1]


def _scaled(quality: Float[np.ndarray, "*row answer"]) -> Float[np.ndarray, "*row answer"]:
    # Min-max over each row, in two steps because the span of huge numbers overflows. A constant row becomes NaN.
    largest = np.abs(quality).max(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        small = quality / largest
        lowest = small.min(-1, keepdims=True)
        return (small - lowest) / (small.max(-1, keepdims=True) - lowest)


def _kept_means(ordered: Float[np.ndarray, "answer"], points: int) -> Float[np.ndarray, "point"]:
    means = np.cumsum(ordered) / np.arange(1, len(ordered) + 1)
    return means[::-1][:points]
