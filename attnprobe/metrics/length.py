"""How much of a score is the length of the answer.

Long answers are wrong more often and have larger sums of anything, so that a score may look good because it
counts tokens. Two figures belong beside any score: its correlation with the length, and how well it tells
answers of about the same length apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy import stats

from attnprobe.metrics.discrimination import auroc_rows
from attnprobe.metrics.inputs import answer_values, binary_labels, check_count, check_same_length, warn_undefined


class LengthControlledAUROC(NamedTuple):
    """AUROC among answers of about the same length.

    Attributes:
        auroc: over pairs of the same stratum of lengths.
        length_auroc: plain AUROC of the length alone, over all pairs: what counting tokens achieves.
        pairs: number of pairs that `auroc` is taken over.
    """

    auroc: float
    length_auroc: float
    pairs: int


class LengthCorrelation(NamedTuple):
    """Correlation of a score with the length: Spearman's and Pearson's, each with its two-sided p-value."""

    spearman: float
    spearman_p: float
    pearson: float
    pearson_p: float


def length_controlled_auroc(
    score: Float[np.ndarray, "answer"] | ArrayLike,
    label: Float[np.ndarray, "answer"] | ArrayLike,
    length: Float[np.ndarray, "answer"] | ArrayLike,
    bins: int = 5,
) -> LengthControlledAUROC:
    """AUROC over pairs, one answer of each label, that lie in the same stratum of lengths.

        sum_s sum_{i in s: label 1} sum_{j in s: label 0} ([score_i > score_j] + [score_i = score_j] / 2) / pairs

    Strata are the quantile bins of the length, each closed at its upper edge. A stratum is a function of the length
    alone, so that answers of equal length are never in different strata; where an edge would fall among equal lengths
    they all go to the lower bin, and bins that no length is left for are empty: there may be fewer strata than `bins`.
    Pairs are pooled over strata, so a stratum counts by its number of pairs. Within a stratum lengths still differ;
    more bins control more and leave fewer pairs. One bin gives the plain AUROC, and a number that is added to all
    scores of a stratum changes nothing.

    Args:
        score, label: as in `auroc`.
        length: [answer], finite; in tokens, or any increasing function of them.
        bins: number of quantile bins, at least 1.

    Returns:
        `LengthControlledAUROC`; NaN, with a warning, where no stratum has both labels.

    Raises:
        ValueError: as `auroc`, a length that is not finite, or bins below 1.

    >>> from attnprobe.metrics import length_controlled_auroc
    >>> found = length_controlled_auroc([1, 2, 11, 12], [0, 1, 0, 1], length=[5, 5, 50, 50], bins=2)
    >>> found.auroc, found.length_auroc, found.pairs
    (1.0, 0.5, 2)

    Source: the stratified Mann-Whitney statistic (van Elteren 1960), strata weighted by their pairs. On length as a
    confounder of such evaluations: Santilli et al. 2025 (arXiv 2504.13677).
    """
    scores, labels = answer_values(score, "score", infinite=True), binary_labels(label)
    lengths = answer_values(length, "length")
    check_same_length(score=scores, label=labels, length=lengths)
    check_count(bins, "bins")
    stratum = length_strata(lengths, bins)
    wins, pairs = 0.0, 0
    for members in (stratum == s for s in np.unique(stratum)):
        found = _pair_count(labels[members])
        if found:
            wins += float(auroc_rows(scores[members], labels[members])) * found
            pairs += found
    if not pairs:
        warn_undefined("no two answers of the same length stratum have different labels: AUROC is NaN; use fewer bins.")
    return LengthControlledAUROC(
        auroc=wins / pairs if pairs else float("nan"),
        length_auroc=float(auroc_rows(lengths, labels)),
        pairs=pairs,
    )


def length_strata(length: Float[np.ndarray, "answer"], bins: int) -> Int[np.ndarray, "answer"]:
    """The quantile bin 0..bins-1 of each length: the number of inner edges that lie below it.

    >>> length_strata(np.array([3.0, 3.0, 3.0, 9.0]), 2).tolist()
    [0, 0, 0, 1]
    """
    edges = np.quantile(length, np.arange(1, bins) / bins)
    return np.searchsorted(edges, length, side="left")


def length_correlation(
    score: Float[np.ndarray, "answer"] | ArrayLike, length: Float[np.ndarray, "answer"] | ArrayLike
) -> LengthCorrelation:
    """Spearman and Pearson correlation of a score with the length, to be reported beside the score.

    Args:
        score: [answer], finite.
        length: [answer], finite, in tokens.

    Returns:
        `LengthCorrelation`; p-values are two-sided, against no correlation (Student's t for Spearman). NaN, with a
        warning, where all scores or all lengths are the same.

    Raises:
        ValueError: an entry that is not finite, lengths that differ, or fewer than three answers.

    >>> from attnprobe.metrics import length_correlation
    >>> found = length_correlation([1, 2, 3, 5], length=[10, 20, 30, 40])
    >>> round(found.spearman, 4), round(found.pearson, 4)
    (1.0, 0.9827)

    Source: `scipy.stats.spearmanr` and `scipy.stats.pearsonr`.
    """
    scores, lengths = answer_values(score, "score"), answer_values(length, "length")
    check_same_length(score=scores, length=lengths)
    if len(scores) < 3:
        raise ValueError(f"a correlation of {len(scores)} answers says nothing; give at least three.")
    for name, values in (("scores", scores), ("lengths", lengths)):
        if values.min() == values.max():
            warn_undefined(f"all {name} are the same: their correlation is NaN.")
            return LengthCorrelation(*[float("nan")] * 4)
    spearman, pearson = stats.spearmanr(scores, lengths), stats.pearsonr(scores, lengths)
    return LengthCorrelation(*(float(value) for value in (*spearman, *pearson)))


def _pair_count(label: Float[np.ndarray, "answer"]) -> int:
    positive = int(label.sum())
    return positive * (len(label) - positive)
