"""Recurrent scores that read the head whose generation block has the largest participation ratio."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnprobe.analyzers import Analyzer, ScreenedTDO, ScreenedTrace
from attnprobe.analyzers.screened_rows import BLOCK_TIE, PREFIX_TIE
from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.recurrent import Recurrent, largest_head


class ScreenedRecurrent(Recurrent):
    """The recurrence at the heads that SAUQ reads: the base of SAUQ, LapEigValRAUQ and LogDetRAUQ.

    The head of a layer is the one whose generation block (rows and columns of the generated tokens, rows renormalised)
    has the largest participation ratio; ties go to the lowest head; with a single token, the largest ratio of the
    prompt's pattern.

    A subclass adds the analyzer of its signal to the one that is here:

    >>> import attnprobe as ap
    >>> class ScreenedSelfAttention(ap.ScreenedRecurrent):
    ...     name, signal = "ScreenedSelfAttention", "self_attention_screened"
    ...     def analyzers(self):
    ...         return [*super().analyzers(), self.at_chosen_heads(ap.SelfAttention())]
    >>> [type(analyzer).__name__ for analyzer in ScreenedSelfAttention().analyzers()]
    ['ScreenedTDO', 'ScreenedTrace']

    Args:
        alpha, layers: as in `Recurrent`.
        measure: of the participation ratio: "intrinsic" (default), "counting", "positional", "zipf" or "unembedding".
        screen: "final" (default): heads are compared at the last step; "mean": by their mean over all steps.
        renormalize: rows of the generation block are made distributions again (default).
        stride: of the prefix ratio that SAUQ reads; the heads do not depend on it.

    Raises:
        ValueError: an unknown option.

    Source: [SG] arXiv 2610.06012, SAUQ.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.2,
        layers: str | Sequence[int] = "middle",
        measure: str = "intrinsic",
        screen: str = "final",
        renormalize: bool = True,
        stride: int = 1,
    ) -> None:
        super().__init__(alpha=alpha, layers=layers)
        if screen not in ("final", "mean"):
            raise ValueError(f"unknown screen {screen!r}: use 'final' or 'mean'.")
        self.screen = screen
        # it checks the measure, and its names are how the traces are found
        block = "generation" if renormalize else "generation-raw"
        self._choice = {"measure": measure, "block": block, "screen": screen}
        self._screened = ScreenedTDO(**self._choice, stride=stride)

    def analyzers(self) -> list[Analyzer]:
        """The analyzer that follows generation blocks. SAUQ reads the same one: asked for together, it runs once."""
        return [self._screened]

    def at_chosen_heads(self, analyzer: Analyzer) -> ScreenedTrace:
        """The trace of an analyzer at the heads that are chosen, which costs far less than at all heads."""
        return ScreenedTrace(analyzer, **self._choice)

    def choose_heads(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        n = evidence.n_tokens
        if n == 1:  # the prefix ratio is float32
            return largest_head(evidence.trace(self._screened.prefix_name, layers)[..., 0], PREFIX_TIE)
        ratios = evidence.trace(self._screened.block_name, layers)[..., 1:n]
        return largest_head(ratios[..., -1] if self.screen == "final" else ratios.mean(-1), BLOCK_TIE)
