"""An LM-Polygraph estimator of sampled answers as a method of `score`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from lm_polygraph.estimators import Estimator

from attnprobe.integrations.lm_polygraph.statistics import KNOWN, compares, statistics, tells_contradiction
from attnprobe.uncertainty.nli import EntailmentModel
from attnprobe.uncertainty.sampled import SampledAssessment, SampledMethod, Samples


class PolygraphMethod(SampledMethod):
    """An LM-Polygraph estimator that reads sampled answers, their probabilities, or what an NLI model says of them.

    Samples and NLI comparisons are ours, shared with every other sampled method of the call; the estimator is given
    them in LM-Polygraph's form. docs/lm_polygraph.md lists the estimators that were tested.

    Args:
        estimator: an estimator object on the level of sequences.
        name: how it is called in results; by default as LM-Polygraph calls it.
        n_samples, temperature, top_k, top_p, nli: as in `SampledMethod`.

    Raises:
        TypeError: not an estimator object.
        ValueError: it needs statistics that sampled answers do not give, or scores tokens or claims; the sentence
            names them.
    """

    def __init__(
        self,
        estimator: Estimator,
        *,
        name: str | None = None,
        n_samples: int = 10,
        temperature: float = 1.0,
        top_k: int | None = 50,
        top_p: float | None = None,
        nli: EntailmentModel | str | None = None,
    ) -> None:
        super().__init__(n_samples=n_samples, temperature=temperature, top_k=top_k, top_p=top_p, nli=nli)
        _check_estimator(estimator)
        self.estimator = estimator
        self.name = str(estimator) if name is None else name

    @property
    def needs(self) -> list[str]:
        """The statistics that the estimator reads, by LM-Polygraph's names."""
        return list(self.estimator.stats_dependencies)

    def prepare(self) -> None:
        """Load the NLI model, where the estimator reads one.

        Raises:
            OSError, ValueError: it cannot be had, or does not tell contradiction and the estimator reads that.
        """
        if compares(self.needs):
            super().prepare()
            labels = getattr(self.nli, "label_names", None)
            if labels is not None:
                self._check_labels(len(labels))

    def assess_samples(self, samples: Samples) -> SampledAssessment:
        """The estimator's number for one prompt's samples.

        Raises:
            ValueError: the estimator gives no finite number for them.
        """
        if compares(self.needs):
            self._check_labels(samples.compared_by(self.nli).logits.shape[-1])
        # estimators of one sample, or of empty texts, divide by nothing: what comes of it is said below
        with np.errstate(all="ignore"):
            given = self.estimator(statistics(self.needs, samples, lambda: self.nli))
        uncertainty = float(np.asarray(given, dtype=np.float64).reshape(-1)[0])
        if not math.isfinite(uncertainty):
            raise ValueError(
                f"{self.name} of LM-Polygraph gives {uncertainty} for these {len(samples.samples)} answers: sample "
                "more, or take another estimator."
            )
        return SampledAssessment(uncertainty, samples=samples.samples)

    def _check_labels(self, n_labels: int) -> None:
        if n_labels != 3 and tells_contradiction(self.needs):
            raise ValueError(
                f"{self.name} needs an NLI model that tells contradiction, and this one has entailment and "
                "not_entailment only."
            )


def _check_estimator(estimator: Any) -> None:
    if isinstance(estimator, type) or not isinstance(estimator, Estimator):
        what = estimator.__name__ if isinstance(estimator, type) else repr(estimator)
        raise TypeError(f"PolygraphMethod wraps an estimator object of LM-Polygraph, not {what}.")
    missing = [name for name in estimator.stats_dependencies if name not in KNOWN]
    if missing:
        raise ValueError(
            f"{estimator} of LM-Polygraph needs {', '.join(missing)}, which sampled answers do not give: there are "
            f"{', '.join(KNOWN)}."
        )
    if estimator.level != "sequence":
        raise ValueError(f"{estimator} of LM-Polygraph gives a number a {estimator.level}, not one an answer.")
