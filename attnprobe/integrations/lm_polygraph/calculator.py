"""The statistic behind estimators that share a pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lm_polygraph.stat_calculators import StatCalculator

from attnprobe.integrations.lm_polygraph.answers import NEEDED, score_answers
from attnprobe.integrations.lm_polygraph.specification import Specification, single_pass_methods

SCORES = "attnprobe_scores"


class AttnProbeCalculator(StatCalculator):
    """Scores LM-Polygraph's greedy answers with several methods in one forward a batch.

    The statistic is a mapping from method names to one number an answer, which `AttnProbeEstimator(shared=True)`
    reads. No attention is kept, and the model may be on sdpa.

    Args:
        methods: names, method objects, or mappings with `method`, perhaps `name`, and options.

    Raises:
        ValueError, TypeError: methods that make no sense, in one sentence.
    """

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        """What is computed, and from what."""
        return [SCORES], list(NEEDED)

    def __init__(self, methods: Iterable[Specification] = ("SAUQ",)) -> None:
        super().__init__()
        self.methods = single_pass_methods(methods)

    def __call__(
        self, dependencies: dict[str, Any], texts: list[str], model: Any, max_new_tokens: int = 100, **kwargs: Any
    ) -> dict[str, Any]:
        """The statistic of one batch; raises as `score` does."""
        return {SCORES: score_answers(self.methods, dependencies, model)}
