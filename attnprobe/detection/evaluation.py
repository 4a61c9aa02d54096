"""How well features tell right answers from wrong ones: held-out texts, and intervals over questions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from attnprobe.detection.features import Features
from attnprobe.detection.linear import COMPONENTS, fit_linear
from attnprobe.detection.splits import folds, group_numbers, held_out
from attnprobe.metrics import Interval, bootstrap
from attnprobe.metrics.discrimination import auroc_rows
from attnprobe.metrics.inputs import binary_labels, check_same_length


@dataclass(frozen=True)
class Evaluation:
    """AUROC on texts that the fit has not seen.

    Attributes:
        auroc: with its interval, over resampled groups (questions).
        train, test: numbers of texts.
        components: principal components of the fit (the most of any fold).
        seed: of the split.
    """

    auroc: Interval
    train: int
    test: int
    components: int
    seed: int


def evaluate(
    features: Features,
    labels: ArrayLike,
    groups: Sequence[Hashable] | ArrayLike | None = None,
    *,
    test_share: float = 0.2,
    seed: int = 0,
    components: int = COMPONENTS,
    resamples: int = 2000,
    level: float = 0.95,
) -> Evaluation:
    """The LapEigvals protocol: one stratified split by seed, PCA and logistic regression, AUROC on what was held out.

    Args:
        features: of the texts.
        labels: [text] 1 for a wrong answer, 0 for a right one.
        groups: [text] the question of each text: the answers of one question never straddle the split.
        test_share: of the texts, above 0 and at most 0.5.
        seed: of the split and of the resamples.
        components: of PCA, at most.
        resamples, level: of the interval, as in `metrics.bootstrap`.

    Raises:
        ValueError: labels that are not 0 and 1, lengths that differ, or texts that cannot be split.

    >>> from attnprobe.detection import Features, FeatureSettings, Fingerprint
    >>> settings, tokens = FeatureSettings("transport", heads=[(0, 0)]), np.full(40, 9)
    >>> values = np.arange(120).reshape(40, 3) / 120  # the later a text, the larger its three features
    >>> features = Features(values, settings, settings.heads, Fingerprint(1, 1, 9, None), tokens, tokens, 0 * tokens)
    >>> found = evaluate(features, np.arange(40) >= 20, resamples=50)
    >>> found.auroc.estimate, found.train, found.test
    (1.0, 32, 8)

    Source: [LE] arXiv 2502.17598; [SG] arXiv 2610.06012, appendix. Grouped splits and intervals are ours.
    """
    checked, numbers = check_labels(features, labels, groups)
    test = held_out(checked, numbers, test_share, seed)
    fitted = fit_linear(features.values[~test], checked[~test], components)
    score = fitted.log_odds(features.values[test])
    auroc = grouped_auroc(score, checked[test], numbers[test], resamples=resamples, level=level, seed=seed)
    return Evaluation(auroc, int((~test).sum()), int(test.sum()), fitted.components, seed)


def out_of_fold(
    features: Features,
    labels: ArrayLike,
    groups: Sequence[Hashable] | ArrayLike | None = None,
    *,
    n_folds: int = 5,
    seed: int = 0,
    components: int = COMPONENTS,
) -> Float[np.ndarray, "text"]:
    """Log-odds (nats) of every text by a fit on the other folds: scores that have not seen their text or its question.

    Raises:
        ValueError: as `evaluate`.
    """
    checked, numbers = check_labels(features, labels, groups)
    score = np.full(len(checked), np.nan)
    for test in folds(checked, numbers, n_folds, seed):
        fitted = fit_linear(features.values[~test], checked[~test], components)
        score[test] = fitted.log_odds(features.values[test])
    return score


def grouped_auroc(
    score: ArrayLike,
    label: ArrayLike,
    groups: Sequence[Hashable] | ArrayLike | None = None,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """AUROC with a bootstrap interval over groups: the answers of one question are drawn, or not, together.

    Args:
        score: [text], higher = more of label 1.
        label: [text] 0 and 1.
        groups: [text] question of each text; without, every text is drawn by itself.

    Returns:
        `metrics.Interval`.

    Raises:
        ValueError: as `metrics.auroc` and `metrics.bootstrap`.

    >>> questions = [1, 1, 2, 2, 3, 3, 4, 4]
    >>> grouped_auroc([1, 4, 3, 8, 2, 9, 3, 2], [0, 1, 0, 1, 0, 1, 0, 1], questions, resamples=100).estimate
    0.84375
    """
    scores, labels = np.asarray(score, dtype=np.float64), binary_labels(label)
    check_same_length(score=scores, label=labels)
    if np.isnan(scores).any():
        raise ValueError(f"score is NaN at index {int(np.isnan(scores).argmax())}; leave that answer out.")
    members = _members(group_numbers(groups, len(labels)))

    def of_groups(drawn: Float[np.ndarray, "group"]) -> float:
        texts = np.concatenate([members[int(group)] for group in drawn])
        return float(auroc_rows(scores[texts], labels[texts]))

    return bootstrap(of_groups, np.arange(len(members), dtype=np.float64), resamples=resamples, level=level, seed=seed)


def check_labels(
    features: Features, labels: ArrayLike, groups: Sequence[Hashable] | ArrayLike | None
) -> tuple[Float[np.ndarray, "text"], Int[np.ndarray, "text"]]:
    """Labels and group numbers of the texts, checked.

    Raises:
        ValueError: labels that are not 0 and 1, that are all the same, or a length that differs.
    """
    checked = binary_labels(labels)
    if len(checked) != len(features):
        raise ValueError(f"there are {len(checked)} labels for {len(features)} texts: give one for each.")
    if checked.min() == checked.max():
        raise ValueError(f"all labels are {int(checked[0])}: a detector needs right answers and wrong ones.")
    return checked, group_numbers(groups, len(checked))


def _members(groups: Int[np.ndarray, "text"]) -> list[Int[np.ndarray, "member"]]:
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
