"""RAUQ: the recurrence with the attention to the previous token as routing signal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnprobe.analyzers import Analyzer, PreviousTokenAttention, SelfAttention
from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.recurrent import Recurrent


class RAUQ(Recurrent):
    """Recurrent attention uncertainty: the recurrence of `SAUQ` with the attention to the previous token as signal.

    The head of a layer is the one with the largest mean signal over the steps.

    Args:
        alpha: weight of the token's probability; 0.2, or 0.8 with `entropy=True`. LM-Polygraph's settings for
            instruction-tuned models are `RAUQ(alpha=0.5)` and `RAUQ(alpha=0.9, entropy=True)`.
        layers: "middle" (default), "all" or layer numbers.
        indexing: "lm-polygraph" (default), what the published benchmark code computes: the attention to itself of the
            position that chose the token; "paper": the attention of the token to the one before it, which needs one
            more forward for the last token's row.
        entropy: log|V| - H_t + 1e-10 takes the place of p_t; scores can then be negative.

    Raises:
        ValueError: an unknown option.

    >>> import attnprobe as ap
    >>> ap.RAUQ().name, ap.RAUQ(entropy=True).name, ap.RAUQ(entropy=True, indexing="paper").name
    ('RAUQ', 'RAUQ-entropy', 'RAUQ-entropy-paper')

    Source: RAUQ arXiv 2505.20045; the indexing and the entropy variant as in LM-Polygraph 0.7.0.
    """

    def __init__(
        self,
        alpha: float | None = None,
        layers: str | Sequence[int] = "middle",
        *,
        indexing: str = "lm-polygraph",
        entropy: bool = False,
    ) -> None:
        super().__init__(alpha=(0.8 if entropy else 0.2) if alpha is None else alpha, layers=layers)
        if indexing not in ("lm-polygraph", "paper"):
            raise ValueError(f"unknown indexing {indexing!r}: use 'lm-polygraph' or 'paper'.")
        self.indexing = indexing
        self.entropy = entropy
        self.needs_last_row = indexing == "paper"
        self.name = "RAUQ" + ("-entropy" if entropy else "") + ("-paper" if indexing == "paper" else "")

    def analyzers(self) -> list[Analyzer]:
        kind = PreviousTokenAttention if self.indexing == "paper" else SelfAttention
        return [kind(final=False, trace=True)]

    def signals(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        n = evidence.n_tokens
        if self.indexing == "lm-polygraph":
            return evidence.trace("self_attention", layers)[..., :n]
        if n == 1:  # no signal is used
            return evidence.trace("previous_token_attention", layers)[..., :1]
        return evidence.trace_through_last_row("previous_token_attention", layers, self.name)[..., 1:]

    def log_weights(self, evidence: Evidence) -> np.ndarray:
        if not self.entropy:
            return evidence.log_probability
        return np.log(np.maximum(np.log(evidence.vocabulary) - evidence.entropy, 0.0) + 1e-10)
