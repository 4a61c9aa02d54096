"""AUROCs of thousands of features at once: as they are, under permuted labels, and resampled.

Every AUROC here is one over pairs of one stratum, one answer of each label:

    sum_s sum_{i in s: label 1} sum_{j in s: label 0} ([x_i > x_j] + [x_i = x_j] / 2) / pairs

One stratum gives the plain AUROC, length bins the length-controlled one, questions the one within questions. With
midranks R inside strata, the sum is `sum_i label_i R_i` less a constant: one matrix product for all features and all
permutations that keep the number of labels of each stratum.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from attnprobe.metrics.ties import tie_bounds

_BLOCK = 2_000_000  # numbers in a temporary array


def stratum_ranks(
    values: Float[np.ndarray, "answer feature"], stratum: Int[np.ndarray, "answer"]
) -> Float[np.ndarray, "answer feature"]:
    """Midranks 1..n of every feature inside of each stratum.

    >>> stratum_ranks(np.array([[5.0], [7.0], [7.0], [1.0]]), np.array([0, 0, 0, 1]))[:, 0].tolist()
    [1.0, 2.5, 2.5, 1.0]
    """
    ranks = np.empty_like(values)
    for s in np.unique(stratum):
        ranks[stratum == s] = stats.rankdata(values[stratum == s], axis=0)
    return ranks


def pair_count(label: Int[np.ndarray, "answer"], stratum: Int[np.ndarray, "answer"]) -> int:
    """Pairs of one stratum and two labels.

    >>> pair_count(np.array([0, 1, 1, 0]), np.array([0, 0, 0, 1]))
    2
    """
    positive, negative = _by_stratum(label, stratum)
    return int(positive @ negative)


def aurocs(
    ranks: Float[np.ndarray, "answer feature"],
    labels: Int[np.ndarray, "*row answer"],
    stratum: Int[np.ndarray, "answer"],
) -> Float[np.ndarray, "*row feature"]:
    """AUROC of every feature under every row of labels; NaN where no stratum has both labels.

    Args:
        ranks: of `stratum_ranks`.
        labels: 0 and 1; every row with as many of each in a stratum as the first.

    >>> aurocs(stratum_ranks(np.array([[1.0], [2.0], [3.0]]), np.zeros(3, int)), np.array([0, 0, 1]), np.zeros(3, int))
    array([1.])
    """
    first = labels.reshape(-1, labels.shape[-1])[0]
    positive, negative = _by_stratum(first, stratum)
    pairs = float(positive @ negative)
    if not pairs:
        return np.full((*labels.shape[:-1], ranks.shape[1]), np.nan)
    # Midranks are halves of whole numbers: the product is exact, and equal AUROCs compare as equal.
    return (labels.astype(np.float64) @ ranks - float(positive @ (positive + 1)) / 2) / pairs


def permuted_labels(
    label: Int[np.ndarray, "answer"], block: Int[np.ndarray, "answer"], permutations: int, seed: int
) -> Iterator[Int[np.ndarray, "row answer"]]:
    """Labels that changed places inside of blocks, `permutations` rows in all, some at a time.

    >>> rows = np.concatenate(list(permuted_labels(np.array([0, 1, 0]), np.array([0, 0, 1]), 50, seed=0)))
    >>> rows.shape, sorted(set(map(tuple, rows.tolist())))
    ((50, 3), [(0, 1, 0), (1, 0, 0)])
    """
    generator = np.random.default_rng(seed)
    order = np.argsort(block, kind="stable")
    sorted_block, sorted_label = np.unique(block[order], return_inverse=True)[1], label[order]
    at_once = max(1, _BLOCK // len(label))
    for low in range(0, permutations, at_once):
        keys = sorted_block + generator.random((min(at_once, permutations - low), len(label)))
        rows = np.empty(keys.shape, dtype=np.int8)
        rows[:, order] = sorted_label[np.argsort(keys, axis=1)]
        yield rows


def null_aurocs(
    ranks: Float[np.ndarray, "answer feature"],
    label: Int[np.ndarray, "answer"],
    stratum: Int[np.ndarray, "answer"],
    block: Int[np.ndarray, "answer"],
    permutations: int,
    seed: int,
) -> Float[np.ndarray, "row feature"]:
    """AUROCs under permuted labels, float32. Blocks lie inside of strata, or there is one stratum."""
    found = [
        aurocs(ranks, rows, stratum).astype(np.float32) for rows in permuted_labels(label, block, permutations, seed)
    ]
    return np.concatenate(found)


def resampled_aurocs(
    values: Float[np.ndarray, "answer feature"],
    label: Int[np.ndarray, "answer"],
    stratum: Int[np.ndarray, "answer"],
    weights: Float[np.ndarray, "answer resample"],
) -> Iterator[Float[np.ndarray, "resample"]]:
    """AUROC of one feature after another where answer i is there `weights[i]` times; NaN where no pair is left."""
    strata = np.unique(stratum, return_inverse=True)[1]
    together = np.argsort(strata, kind="stable")
    start = np.searchsorted(strata[together], np.arange(strata.max() + 1))
    positive_weights, negative_weights = (
        (weights * side[:, None]).astype(np.float32) for side in (label == 1, label == 0)
    )
    positives, negatives = (np.add.reduceat(w[together], start) for w in (positive_weights, negative_weights))
    pairs = (positives * negatives).sum(0)
    scale = 1 / np.where(pairs > 0, pairs, np.nan)
    for feature in values.T:
        order = np.lexsort((feature, strata))
        # One axis for both: strata come one after the other, and inside of them the feature.
        first, last = tie_bounds(np.stack([strata[order], feature[order]]))
        first, last = np.maximum(first[0], first[1]), np.minimum(last[0], last[1])
        below = np.zeros((len(order) + 1, weights.shape[1]), dtype=np.float32)
        np.cumsum(negative_weights[order], axis=0, out=below[1:])
        of_label = label[order] == 1
        halfway = below[first[of_label]] + below[last[of_label] + 1]
        wins = np.einsum("ir,ir->r", positive_weights[order[of_label]], halfway) / 2
        yield (wins - (positives * below[start]).sum(0)) * scale


def resampled_within(
    ranks: Float[np.ndarray, "answer feature"],
    label: Int[np.ndarray, "answer"],
    stratum: Int[np.ndarray, "answer"],
    weights: Float[np.ndarray, "answer resample"],
) -> Float[np.ndarray, "resample feature"]:
    """AUROC of every feature where whole strata are drawn: a stratum that is drawn twice is two strata.

    Args:
        ranks: of `stratum_ranks`.
        weights: the same for all answers of a stratum.
    """
    strata = np.unique(stratum, return_inverse=True)[1]
    order = np.argsort(strata, kind="stable")
    start = np.searchsorted(strata[order], np.arange(strata.max() + 1))
    positive, negative = _by_stratum(label, stratum)
    wins = np.add.reduceat((ranks * label[:, None])[order], start) - (positive * (positive + 1) / 2)[:, None]
    times = weights[order][start].astype(np.float64)
    pairs = times.T @ (positive * negative)
    return (times.T @ wins) / np.where(pairs > 0, pairs, np.nan)[:, None]


def cluster_weights(
    group: Int[np.ndarray, "answer"], resamples: int, seed: int
) -> Float[np.ndarray, "answer resample"]:
    """How often each answer is there when its whole group is drawn with replacement, resample by resample.

    >>> weights = cluster_weights(np.array([0, 0, 1]), 5, seed=0)
    >>> bool((weights[0] == weights[1]).all()), (weights[0] + weights[2]).tolist()
    (True, [2.0, 2.0, 2.0, 2.0, 2.0])
    """
    codes = np.unique(group, return_inverse=True)[1]
    n_groups = codes.max() + 1
    drawn = np.random.default_rng(seed).multinomial(n_groups, np.full(n_groups, 1 / n_groups), size=resamples)
    return drawn.T.astype(np.float32)[codes]


def _by_stratum(
    label: Int[np.ndarray, "answer"], stratum: Int[np.ndarray, "answer"]
) -> tuple[Float[np.ndarray, "stratum"], Float[np.ndarray, "stratum"]]:
    codes = np.unique(stratum, return_inverse=True)[1]
    positive = np.bincount(codes, label).astype(np.float64)
    return positive, np.bincount(codes) - positive
