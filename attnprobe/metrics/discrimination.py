"""Areas under curves: how well a score tells two kinds of answers apart."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score, roc_auc_score

from attnprobe.metrics.inputs import answer_values, binary_labels, check_same_length, warn_undefined
from attnprobe.metrics.ties import tie_bounds


def auroc(score: Float[np.ndarray, "answer"] | ArrayLike, label: Float[np.ndarray, "answer"] | ArrayLike) -> float:
    """Probability that an answer of label 1 has the higher score than one of label 0; ties count one half.

    Args:
        score: [answer], higher = more of label 1 (an uncertainty, where label 1 is a wrong answer); only the order
            counts, so infinities are fine.
        label: [answer], 0 and 1, or booleans.

    Returns:
        A float in [0, 1], 0.5 at chance; NaN, with a warning, where all labels are the same.

    Raises:
        ValueError: a NaN, another label than 0 and 1, lengths that differ.

    >>> from attnprobe.metrics import auroc
    >>> auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
    0.75

    Source: `sklearn.metrics.roc_auc_score`.
    """
    place, labels = _checked(score, label)
    return float(roc_auc_score(labels, place)) if _both(labels, "AUROC") else float("nan")


def average_precision(
    score: Float[np.ndarray, "answer"] | ArrayLike, label: Float[np.ndarray, "answer"] | ArrayLike
) -> float:
    """Area under the precision-recall curve: sum_t (recall_t - recall_{t-1}) precision_t over thresholds.

    Args:
        score, label: as in `auroc`.

    Returns:
        A float in (0, 1], in expectation about the share of label 1 at chance; NaN, with a warning, where all
        labels are the same.

    Raises:
        ValueError: as `auroc`.

    >>> from attnprobe.metrics import average_precision
    >>> round(average_precision([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 4)
    0.8333

    Source: `sklearn.metrics.average_precision_score`.
    """
    place, labels = _checked(score, label)
    return float(average_precision_score(labels, place)) if _both(labels, "average precision") else float("nan")


def auroc_rows(
    score: Float[np.ndarray, "*row answer"], label: Float[np.ndarray, "*row answer"]
) -> Float[np.ndarray, "*row"]:
    """AUROC of every row from rank sums (Mann and Whitney); NaN where a row has one label. Nothing is checked."""
    order = np.argsort(score, axis=-1)
    first, last = tie_bounds(np.take_along_axis(score, order, axis=-1))
    ranks = (first + last) / 2 + 1
    positive = label.sum(-1)
    negative = label.shape[-1] - positive
    wins = (ranks * np.take_along_axis(label, order, axis=-1)).sum(-1) - positive * (positive + 1) / 2
    with np.errstate(invalid="ignore"):
        return wins / (positive * negative)


def average_precision_rows(
    score: Float[np.ndarray, "*row answer"], label: Float[np.ndarray, "*row answer"]
) -> Float[np.ndarray, "*row"]:
    """Average precision of every row; NaN where a row has one label. Nothing is checked."""
    order = np.argsort(-score, axis=-1)
    _, last = tie_bounds(np.take_along_axis(score, order, axis=-1))
    ordered = np.take_along_axis(label, order, axis=-1)
    # A threshold lets a whole tied run in, so that an answer sees the precision at the end of its run.
    precision = np.take_along_axis(np.cumsum(ordered, axis=-1), last, axis=-1) / (last + 1)
    positive = label.sum(-1)
    both = (positive > 0) & (positive < label.shape[-1])
    return (ordered * precision).sum(-1) / np.where(both, positive, np.nan)


def _checked(score: ArrayLike, label: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    scores, labels = answer_values(score, "score", infinite=True), binary_labels(label)
    check_same_length(score=scores, label=labels)
    # Places in the order stand for the scores: scikit-learn refuses infinities.
    return np.unique(scores, return_inverse=True)[1], labels


def _both(labels: Float[np.ndarray, "answer"], metric: str) -> bool:
    if labels.min() < labels.max():
        return True
    warn_undefined(f"all labels are {int(labels[0])}, so that there is nothing to tell apart: {metric} is NaN.")
    return False
