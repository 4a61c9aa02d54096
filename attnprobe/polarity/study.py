"""Which way each transport feature points on hallucinated answers of one data set.

The polarity of a feature is the side of 1/2 on which its AUROC lies: + where it is higher on hallucinated answers.
Three AUROCs stand side by side. `plain` is over all pairs of answers; `length` over pairs whose answers are of about
the same length, because any sum over tokens tells long answers from short ones; `question`, where questions have
answers of both labels, over the answers of one question.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy import stats

from attnprobe.metrics import holm_correction
from attnprobe.metrics.inputs import check_count
from attnprobe.metrics.intervals import check_settings
from attnprobe.metrics.length import length_strata
from attnprobe.polarity.features import Features
from attnprobe.polarity.ranking import (
    aurocs,
    cluster_weights,
    null_aurocs,
    pair_count,
    resampled_aurocs,
    resampled_within,
    stratum_ranks,
)

#: Below this conductance a head is said to pierce the floor of [ST].
FLOOR = 0.2
KINDS = ("plain", "length", "question")
LEVELS = ("response", "layer", "head")
_FEW = 10


@dataclass(frozen=True)
class StudySettings:
    """How the study counts.

    Attributes:
        bins: quantile bins of the length of answers, for the length-controlled AUROC.
        resamples: of questions, for the intervals.
        permutations: of labels, for the p-values (see `one_sided`).
        level: of the intervals.
        alpha: a feature counts as significant up to this corrected p-value.
        seed: of resamples and permutations.
    """

    bins: int = 5
    resamples: int = 1000
    permutations: int = 9999
    level: float = 0.95
    alpha: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self.resamples, self.level)
        check_count(self.permutations, "permutations")
        check_count(self.bins, "bins")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}; give a number between 0 and 1, such as 0.05.")


@dataclass(frozen=True, eq=False)
class Design:
    """Features as a matrix.

    Attributes:
        names: a row a feature: level, quantity, layer, head (missing where all are meant).
        values: [answer, feature].
    """

    names: pd.DataFrame
    values: Float[np.ndarray, "answer feature"]

    @classmethod
    def of(cls, features: Features) -> Design:
        """Means over all heads of a response, means over the heads of a layer, and heads.

        `below_floor` is the fraction of heads with phi < 1/5, of a response and of a layer.
        """
        names: list[tuple[str, str, int, int]] = []
        columns: list[np.ndarray] = []
        below = (features.values["phi"] < FLOOR).astype(np.float64)
        for quantity, values in {**features.values, "below_floor": below}.items():
            names.append(("response", quantity, -1, -1))
            columns.append(values.mean((1, 2)))
            names += [("layer", quantity, layer, -1) for layer in features.layers]
            columns += list(values.mean(2).T)
            if quantity != "below_floor":
                heads = range(values.shape[2])
                names += [("head", quantity, layer, head) for layer in features.layers for head in heads]
                columns += list(values.reshape(len(values), -1).T)
        frame = pd.DataFrame(names, columns=["level", "quantity", "layer", "head"])
        frame[["layer", "head"]] = frame[["layer", "head"]].astype("Int64").replace(-1, pd.NA)
        order = frame["level"].map(LEVELS.index).argsort(kind="stable").to_numpy()
        return cls(frame.iloc[order].reset_index(drop=True), np.stack(columns, axis=1)[:, order])


@dataclass(frozen=True, eq=False)
class Comparison:
    """One kind of AUROC on one data set.

    Attributes:
        kind: "plain", "length" or "question".
        pairs: of answers that are compared.
        auroc, low, high: [feature], and the ends of the bootstrap interval.
        p_up, p_down: [feature] one-sided permutation p-values: of so high, and of so low an AUROC.
        p_adjusted: [feature] two-sided, corrected among the features of a level: Holm over the few of a response,
            Benjamini and Hochberg over layers and over heads.
        null: [permutation, feature] AUROCs under permuted labels.
        length_auroc: the same AUROC of the length of the answer.
    """

    kind: str
    pairs: int
    auroc: Float[np.ndarray, "feature"]
    low: Float[np.ndarray, "feature"]
    high: Float[np.ndarray, "feature"]
    p_up: Float[np.ndarray, "feature"]
    p_down: Float[np.ndarray, "feature"]
    p_adjusted: Float[np.ndarray, "feature"]
    null: Float[np.ndarray, "permutation feature"] = field(repr=False)
    length_auroc: float

    @property
    def p_value(self) -> Float[np.ndarray, "feature"]:
        """Two-sided."""
        return np.minimum(1.0, 2 * np.minimum(self.p_up, self.p_down))

    @property
    def polarity(self) -> Int[np.ndarray, "feature"]:
        """+1 where the feature is higher on hallucinated answers, -1 where lower, 0 at exactly 1/2 or without pairs."""
        return np.sign(np.nan_to_num(self.auroc - 0.5)).astype(int)


@dataclass(frozen=True, eq=False)
class Polarity:
    """What was found on one data set.

    Attributes:
        features: the features it was found with.
        names: a row a feature, as in `Design`.
        comparisons: kind -> `Comparison`.
        settings: how it was counted.
    """

    features: Features
    names: pd.DataFrame
    comparisons: dict[str, Comparison]
    settings: StudySettings

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row a feature and kind: data, kind, level, quantity, layer, head, auroc, low, high, polarity, p,
        p_adjusted, significant."""
        frames = [
            self.names.assign(
                kind=kind,
                auroc=found.auroc,
                low=found.low,
                high=found.high,
                polarity=found.polarity,
                p=found.p_value,
                p_adjusted=found.p_adjusted,
                significant=found.p_adjusted <= self.settings.alpha,
            )
            for kind, found in self.comparisons.items()
        ]
        table = pd.concat(frames, ignore_index=True)
        table.insert(0, "data", self.features.label)
        table.insert(1, "kind", table.pop("kind"))
        return table

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Numbers of the data set: answers, questions, lengths, cuts, floor, and the AUROC of length alone."""
        answers = self.features.answers
        below = (self.features.values["phi"] < FLOOR).mean((1, 2))
        sides = {"right": answers["label"].to_numpy() == 0, "hallucinated": answers["label"].to_numpy() == 1}
        return {
            "data": self.features.label,
            "answers": len(answers),
            "questions": int(answers["group"].nunique()),
            "hallucinated": int(answers["label"].sum()),
            "truncated": self.features.truncated,
            "left_out": len(self.features.failed),
            "median_answer_tokens": {side: float(answers["tokens"][of].median()) for side, of in sides.items()},
            "median_prompt_tokens": float(answers["prompt_tokens"].median()),
            "heads_below_floor": {side: float(below[of].mean()) for side, of in sides.items()},
            "length_auroc": {kind: found.length_auroc for kind, found in self.comparisons.items()},
            "pairs": {kind: found.pairs for kind, found in self.comparisons.items()},
        }


def polarity_of(features: Features, settings: StudySettings | None = None) -> Polarity:
    """AUROC of every feature on one data set, its interval, its side of 1/2 and its p-values.

    Intervals resample questions, the answers of one staying together; length bins stay those of all answers. P-values
    come from permuting labels: for `plain` and `question` inside of questions, where any question has answers of both
    labels, and else among all answers (the hypothesis: the answers of a question are exchangeable); for `length` inside
    of the length bins (the hypothesis: label and feature have nothing to do with each other among answers of one bin).
    The latter does not know of questions. Where the two answers of a question are alike in a feature, as prompts make
    them, that makes it cautious.

    Args:
        features: of answers of both labels.
        settings: `StudySettings()` by default.

    Raises:
        ValueError: the answers have one label, or belong to fewer than two questions.

    Source: [ST] arXiv 2605.04893; stratified Mann-Whitney (van Elteren 1960); cluster bootstrap (Field and Welsh 2007).
    """
    settings = settings or StudySettings()
    label = features.answers["label"].to_numpy().astype(np.int64)
    group = np.unique(features.answers["group"].to_numpy().astype(str), return_inverse=True)[1]
    if label.min() == label.max():
        raise ValueError(f"all {len(label)} answers of {features.label} that could be read have the label {label[0]}.")
    if group.max() < 1:
        raise ValueError(f"all answers of {features.label} belong to one question: give more.")
    design = Design.of(features)
    length = features.answers["tokens"].to_numpy(np.float64)
    weights = cluster_weights(group, settings.resamples, settings.seed)
    comparisons = {
        kind: _compare(kind, design, label, length, stratum, block, weights, settings)
        for kind, stratum, block in _kinds(label, group, length, settings.bins)
    }
    return Polarity(features, design.names, comparisons, settings)


def is_paired(label: Int[np.ndarray, "answer"], group: Int[np.ndarray, "answer"]) -> bool:
    """Whether any question has answers of both labels.

    >>> is_paired(np.array([0, 1, 1]), np.array([0, 0, 1])), is_paired(np.array([0, 1]), np.array([0, 1]))
    (True, False)
    """
    return pair_count(label, group) > 0


def _kinds(
    label: Int[np.ndarray, "answer"], group: Int[np.ndarray, "answer"], length: Float[np.ndarray, "answer"], bins: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Kind, strata of the pairs, and blocks in which labels change places."""
    everything, binned = np.zeros_like(group), length_strata(length, bins)
    paired = is_paired(label, group)
    yield "plain", everything, group if paired else everything
    yield "length", binned, binned
    if paired:
        yield "question", group, group


def _compare(
    kind: str,
    design: Design,
    label: Int[np.ndarray, "answer"],
    length: Float[np.ndarray, "answer"],
    stratum: Int[np.ndarray, "answer"],
    block: Int[np.ndarray, "answer"],
    weights: Float[np.ndarray, "answer resample"],
    settings: StudySettings,
) -> Comparison:
    ranks = stratum_ranks(design.values, stratum)
    observed = aurocs(ranks, label, stratum)
    null = null_aurocs(ranks, label, stratum, block, settings.permutations, settings.seed)
    p_up, p_down = one_sided(observed, null)
    if kind == "question":
        resampled: Iterable[np.ndarray] = resampled_within(ranks, label, stratum, weights).T
    else:
        resampled = resampled_aurocs(design.values, label, stratum, weights)
    low, high = _intervals(resampled, settings.level)
    return Comparison(
        kind=kind,
        pairs=pair_count(label, stratum),
        auroc=observed,
        low=low,
        high=high,
        p_up=p_up,
        p_down=p_down,
        p_adjusted=adjusted(np.minimum(1.0, 2 * np.minimum(p_up, p_down)), design.names["level"].to_numpy()),
        null=null,
        length_auroc=float(aurocs(stratum_ranks(length[:, None], stratum), label, stratum)[0]),
    )


def one_sided(
    observed: Float[np.ndarray, "feature"], null: Float[np.ndarray, "permutation feature"]
) -> tuple[Float[np.ndarray, "feature"], Float[np.ndarray, "feature"]]:
    """p-values of so high and of so low a value; NaN where observed is.

        (1 + how many permuted values are as extreme) / (1 + permutations)

    and where fewer than ten are, the tail of the normal distribution with the mean and the standard deviation of
    the permuted values if that is smaller: counts end at 1 / (1 + permutations), which is too high a floor for a
    correction among thousands of features. Rank sums are nearly normal, and have lighter tails.

    >>> [p.tolist() for p in one_sided(np.array([2.0]), np.tile([[1.0], [2.0], [3.0]], (33, 1)))]
    [[0.67], [0.67]]

    Source: scipy.stats.permutation_test (the count); Mann and Whitney 1947 (the normal limit).
    """
    shown = observed.astype(null.dtype)
    spread = null.std(0, dtype=np.float64)
    z = np.divide(observed - null.mean(0, dtype=np.float64), spread, out=np.zeros(len(spread)), where=spread > 0)
    found = []
    for extreme, tail in (((null >= shown).sum(0), stats.norm.sf(z)), ((null <= shown).sum(0), stats.norm.cdf(z))):
        counted = (1 + extreme) / (1 + len(null))
        p = np.where((extreme < _FEW) & (spread > 0), np.minimum(counted, tail), counted)
        found.append(np.where(np.isnan(observed), np.nan, p))
    return found[0], found[1]


def adjusted(p: Float[np.ndarray, "feature"], level: Any) -> Float[np.ndarray, "feature"]:
    """Corrected p-values, level by level: Holm at the level of responses, Benjamini and Hochberg below; NaN stays.

    Source: Holm 1979; Benjamini and Hochberg 1995 (`scipy.stats.false_discovery_control`).
    """
    out = np.full(len(p), np.nan)
    for name in LEVELS:
        members = np.flatnonzero((level == name) & ~np.isnan(p))
        if len(members):
            correct = holm_correction if name == "response" else stats.false_discovery_control
            out[members] = correct(p[members])
    return out


def _intervals(
    resampled: Iterable[Float[np.ndarray, "resample"]], level: float
) -> tuple[Float[np.ndarray, "feature"], Float[np.ndarray, "feature"]]:
    """Percentile intervals; resamples without a pair are left out."""
    ends = [(1 - level) / 2, (1 + level) / 2]
    found = []
    for drawn in resampled:
        known = drawn[~np.isnan(drawn)]
        found.append(np.quantile(known, ends) if len(known) else np.full(2, np.nan))
    low, high = np.array(found, dtype=np.float64).T
    return low, high
