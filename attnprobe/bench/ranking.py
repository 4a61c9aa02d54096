"""Figures of one task: how well each method ranks its answers, with intervals, and what else belongs beside."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

#: name -> what it is called in full. Of the two areas, answers of quality 0 are what a method should find.
METRICS = {"prr": "Prediction rejection ratio", "auroc": "AUROC", "average_precision": "Average precision"}

#: Columns of figures of a method on a task.
FIGURES = ("value", "low", "high", "difference", "difference_low", "difference_high", "p", "p_holm")


@dataclass(frozen=True)
class Settings:
    """How methods are ranked.

    Attributes:
        metric: a name in `METRICS`.
        max_rejection: of the prediction rejection ratio.
        level: of the intervals.
        baseline: the method that all others are compared with; None compares nothing.
        resamples, permutations, seed: of intervals and tests.
    """

    metric: str
    max_rejection: float
    level: float
    baseline: str | None
    resamples: int
    permutations: int
    seed: int

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"there is no metric {self.metric!r}: there are {', '.join(METRICS)}.")
        if not 0 < self.max_rejection <= 1:
            raise ValueError(f"max_rejection is {self.max_rejection}; give a fraction of the answers, in (0, 1].")
        if not 0 < self.level < 1:
            raise ValueError(f"level is {self.level}; give a confidence level between 0 and 1, such as 0.9.")

    def function(self) -> Callable[..., float]:
        """The metric as a function of uncertainty and target."""
        from attnprobe import metrics

        if self.metric == "prr":
            return partial(metrics.prediction_rejection_ratio, max_rejection=self.max_rejection)
        return {"auroc": metrics.auroc, "average_precision": metrics.average_precision}[self.metric]

    def target(self, quality: np.ndarray) -> np.ndarray:
        """What an uncertainty should tell: the quality, or whether an answer is wrong.

        Raises:
            ValueError: an area under a curve is asked for, and qualities are graded.
        """
        if self.metric == "prr":
            return quality
        graded = quality[(quality != 0) & (quality != 1)]
        if len(graded):
            raise ValueError(f"{self.metric} needs qualities of 0 or 1, and there is {graded[0]:g}; take prr.")
        return 1 - quality


def rank(answers: pd.DataFrame, methods: Sequence[str], settings: Settings) -> tuple[pd.DataFrame, list[str]]:
    """The figures of every method on the answers of one task.

    Args:
        answers: rows without failures: quality, tokens, and a column a method.

    Returns:
        A DataFrame with a row a method: method, the columns of `FIGURES`, and length_correlation (Spearman's, with the
        number of tokens of the answer); and sentences on what has no value, and why.
    """
    import pandas as pd

    from attnprobe import metrics

    if answers.empty:
        figures = {"method": list(methods), **dict.fromkeys((*FIGURES, "length_correlation"), float("nan"))}
        return pd.DataFrame(figures), ["there are no answers yet."]
    scores = {method: answers[method].to_numpy(np.float64) for method in methods}
    baseline = settings.baseline if settings.baseline in scores else None
    with _notices() as notices:
        try:
            table = metrics.compare(
                scores,
                settings.target(answers["quality"].to_numpy(np.float64)),
                metric=settings.function(),
                baseline=baseline,
                resamples=settings.resamples,
                permutations=settings.permutations,
                level=settings.level,
                seed=settings.seed,
            )
        except ValueError as error:
            notices.append(_unnamed(str(error), methods))
            table = pd.DataFrame({"method": list(methods), **dict.fromkeys(FIGURES, float("nan"))})
        lengths = answers["tokens"].to_numpy(np.float64)
        table["length_correlation"] = [_length_correlation(scores[method], lengths) for method in methods]
    return table, list(dict.fromkeys(notices))


def mean_rank(
    tasks: Sequence[pd.DataFrame], methods: Sequence[str], settings: Settings
) -> tuple[pd.DataFrame, list[str]]:
    """The mean of a figure over tasks, whose answers are drawn anew independently of one another.

    Args:
        tasks: the answers of each, as in `rank`.

    Returns:
        As `rank`; without p-values and correlations with the length.
    """
    import pandas as pd

    with _notices() as notices:
        try:
            values = {method: float(np.mean([_value(one, method, settings) for one in tasks])) for method in methods}
            drawn = {
                method: np.mean([_resampled(one, method, settings, place) for place, one in enumerate(tasks)], axis=0)
                for method in methods
            }
        except ValueError as error:
            notices.append(_unnamed(str(error), methods))
            nothing = float("nan")
            values, drawn = dict.fromkeys(methods, nothing), dict.fromkeys(methods, np.array([nothing]))
    table = pd.DataFrame({"method": list(methods), **dict.fromkeys((*FIGURES, "length_correlation"), float("nan"))})
    ends = [50 * (1 - settings.level), 50 * (1 + settings.level)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all NaN, where there is no value
        for place, method in enumerate(methods):
            table.loc[place, ["value", "low", "high"]] = [values[method], *np.nanpercentile(drawn[method], ends)]
            if settings.baseline in drawn and method != settings.baseline:
                difference = drawn[method] - drawn[settings.baseline]
                table.loc[place, ["difference", "difference_low", "difference_high"]] = [
                    values[method] - values[settings.baseline],
                    *np.nanpercentile(difference, ends),
                ]
    return table, list(dict.fromkeys(notices))


def _value(answers: pd.DataFrame, method: str, settings: Settings) -> float:
    target = settings.target(answers["quality"].to_numpy(np.float64))
    return float(settings.function()(answers[method].to_numpy(np.float64), target))


def _resampled(answers: pd.DataFrame, method: str, settings: Settings, place: int) -> np.ndarray:
    """[resample] of the metric; the same resamples for every method, and others for every task."""
    from attnprobe.metrics.rowwise import batch_of, row_form

    rows = row_form(settings.function())
    score = answers[method].to_numpy(np.float64)
    target = settings.target(answers["quality"].to_numpy(np.float64))
    generator, n = np.random.default_rng([settings.seed, place]), len(answers)
    found = []
    for low in range(0, settings.resamples, batch_of(n)):
        drawn = generator.integers(0, n, (min(batch_of(n), settings.resamples - low), n))
        found.append(rows(score[drawn], target[drawn]))
    return np.concatenate(found)


def _length_correlation(score: np.ndarray, tokens: np.ndarray) -> float:
    from scipy import stats

    from attnprobe import metrics

    if len(score) < 3:
        return float("nan")
    # Ranks have the same Spearman correlation, and an infinite score has a rank too.
    return metrics.length_correlation(stats.rankdata(score), tokens).spearman


@contextlib.contextmanager
def _notices() -> Iterator[list[str]]:
    """A list that holds, once the block is left, what the metrics have warned of."""
    from sklearn.exceptions import UndefinedMetricWarning

    sentences: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UndefinedMetricWarning)
        yield sentences
    sentences += [str(one.message) for one in caught if issubclass(one.category, UndefinedMetricWarning)]


def _unnamed(said: str, methods: Sequence[str]) -> str:
    """Without the name of the method, where it is true of all."""
    prefix = f"method {methods[0]!r}: "
    return said.removeprefix(prefix)
