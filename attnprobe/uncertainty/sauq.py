"""SAUQ: the recurrence with the participation ratio as routing signal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.screened import ScreenedRecurrent


class SAUQ(ScreenedRecurrent):
    """Spectral attention uncertainty: the signal is the participation ratio of one head's pattern at each step.

        c_1 = p_1,    c_t = alpha p_t + (1 - alpha) s_t c_{t-1},    U_l = 1 - (1/T) sum_t log c_t,    U = max_l U_l

    c_t is the running confidence. U is at least 1, and 1 only where every p_t and s_t is 1. Signals are small, so that
    U is near 1 + Perplexity + (T - 1)/T log(1/alpha): compare answers of like length.

    The head of a layer is the one whose generation block (rows and columns of the generated tokens, rows renormalised)
    has the largest participation ratio; ties go to the lowest head; with a single token, the largest ratio of the
    prompt's pattern.

    Args:
        alpha: weight of the token's probability, 0.2.
        layers: "middle" (default), "all" or layer numbers.
        measure: "intrinsic" (default), "counting", "positional", "zipf" or "unembedding". The head is chosen by the
            same measure (our reading).
        scope: "prefix" (default): the pattern of all tokens so far; "generation": the generation block alone.
        screen: "final" (default): heads are compared at the last step; "mean": over all steps.
        renormalize: rows of the generation block are made distributions again (default).
        stride: compute the signal of the prefix at every stride-th token and hold it between; 1 is exact.

    Raises:
        ValueError: an unknown option.

    >>> import attnprobe as ap
    >>> ap.SAUQ().name, ap.SAUQ(scope="generation").name, ap.SAUQ(measure="counting").name
    ('SAUQ', 'SAUQ-generation', 'SAUQ-counting')

    Source: [SG] arXiv 2610.06012, SAUQ.
    """

    def __init__(
        self,
        alpha: float = 0.2,
        layers: str | Sequence[int] = "middle",
        measure: str = "intrinsic",
        scope: str = "prefix",
        *,
        screen: str = "final",
        renormalize: bool = True,
        stride: int = 1,
    ) -> None:
        super().__init__(
            alpha=alpha, layers=layers, measure=measure, screen=screen, renormalize=renormalize, stride=stride
        )
        if scope not in ("prefix", "generation"):
            raise ValueError(f"unknown scope {scope!r}: use 'prefix' or 'generation'.")
        self.measure = measure
        self.scope = scope
        self.renormalize = renormalize
        self.name = "-".join(
            ["SAUQ"]
            + (["generation"] if scope == "generation" else [])
            + ([measure] if measure != "intrinsic" else [])
            + ([] if renormalize else ["raw"])
            + ([] if screen == "final" else ["mean"])
            + ([] if stride == 1 else [f"stride{stride}"])
        )

    def signals(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        name = self._screened.prefix_name if self.scope == "prefix" else self._screened.block_name
        return evidence.trace(name, layers)[..., : evidence.n_tokens]
