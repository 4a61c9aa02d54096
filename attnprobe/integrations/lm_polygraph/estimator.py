"""One method of this library as an LM-Polygraph estimator."""

from __future__ import annotations

from typing import Any

import numpy as np
from lm_polygraph.estimators import Estimator

from attnprobe.integrations.lm_polygraph.answers import NEEDED, score_answers
from attnprobe.integrations.lm_polygraph.calculator import SCORES
from attnprobe.integrations.lm_polygraph.specification import single_pass_method
from attnprobe.uncertainty.method import Method


class AttnProbeEstimator(Estimator):
    """A single-pass score of LM-Polygraph's greedy answers; higher = less certain.

    An answer has the number that `attnprobe.score(model, prompts, completions=...)` gives the same tokens, alone or in
    a batch.

    Args:
        method: a name (`attnprobe.uncertainty.method_names(sampled=False)`) or a method object.
        name: how it is called in results, after "AttnProbe_"; by default the method's name and its options.
        shared: take the numbers from an `AttnProbeCalculator`, which computes several methods in one forward and has
            to be among the manager's calculators. Otherwise the estimator makes a forward of its own, and needs nothing
            but what LM-Polygraph generates anyway.
        options: of the method, where it is given by name, such as `alpha=0.5`.

    Raises:
        ValueError, TypeError: an unknown method or option, or one that samples.
    """

    def __init__(
        self, method: str | Method = "SAUQ", *, name: str | None = None, shared: bool = False, **options: Any
    ) -> None:
        self.method = single_pass_method(method, name, **options)
        self.shared = bool(shared)
        super().__init__([SCORES] if self.shared else list(NEEDED), "sequence")

    def __str__(self) -> str:
        return f"AttnProbe_{self.method.name}"

    def __call__(self, stats: dict[str, Any]) -> np.ndarray:
        """A number for each answer of the batch.

        Raises:
            ValueError: the calculator does not compute this method.
        """
        if not self.shared:
            return np.array(score_answers([self.method], stats, stats["model"])[self.method.name])
        if self.method.name not in stats[SCORES]:
            raise ValueError(
                f"the AttnProbeCalculator computes {', '.join(stats[SCORES])} and not {self.method.name}: add it to "
                "its methods, or leave out shared."
            )
        return np.array(stats[SCORES][self.method.name])
