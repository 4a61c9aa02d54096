"""AttentionScore: what the tokens of one layer give to themselves."""

from __future__ import annotations

import numpy as np

from attnprobe.analyzers import Analyzer, LogDeterminant
from attnprobe.probe_settings import check_layers, named_layers
from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.method import Assessment, Method

# Of the source: what is added to every weight.
EPSILON = 1e-12


class AttentionScore(Method):
    """Minus the log-determinant of one layer's patterns, mean over its heads, nats.

        U = -(1/H) sum_h sum_t log(A_tt + 1e-12)

    It is a sum over tokens and so grows with the text: compare answers of like length.

    Args:
        layer: which layer, L//2 by default.
        generation_only: False (default): t runs over prompt and generation, the last generated token included, whose
            row takes one more forward. True: over the generated tokens but the last, as in LM-Polygraph and as in the
            generation block of SAUQ; 0 where a single token was generated.

    Raises:
        ValueError: a layer that is no layer number; when it runs, a layer without attention.

    >>> import attnprobe as ap
    >>> ap.AttentionScore().name, ap.AttentionScore(layer=3, generation_only=True).name
    ('AttentionScore', 'AttentionScore-generation-layer3')

    Source: LLM-Check, NeurIPS 2024, attention score; sum, mean, sign and 1e-12 as in LM-Polygraph 0.7.0.
    """

    def __init__(self, layer: int | None = None, generation_only: bool = False) -> None:
        self.layer = layer
        self.layers = "center" if layer is None else check_layers([layer])
        self.generation_only = generation_only
        self.needs_last_row = not generation_only
        self._log_determinant = LogDeterminant(EPSILON, trace=True)
        self.name = (
            "AttentionScore" + ("-generation" if generation_only else "") + ("" if layer is None else f"-layer{layer}")
        )

    def analyzers(self) -> list[Analyzer]:
        return [self._log_determinant]

    def assess(self, evidence: Evidence) -> Assessment:
        name, n = self._log_determinant.sum_name, evidence.n_tokens
        layers = named_layers(self.layers, evidence.n_layers) if isinstance(self.layers, str) else self.layers
        if self.generation_only:  # what the row of each step adds to that of the prompt's last token
            sums = evidence.trace(name, tuple(layers))[0]
            by_head = sums[:, n - 1] - sums[:, 0]
        else:
            by_head = evidence.trace_through_last_row(name, tuple(layers), self.name)[0, :, n]
        by_head = by_head[~np.isnan(by_head)]  # a layer of fewer heads than another is filled with NaN
        if not len(by_head):
            raise ValueError(
                f"{self.name} has no log-determinant at the last step: let the probe follow one generation as a whole, "
                "and pass as many tokens as were generated."
            )
        return Assessment(float(-by_head.mean()) + 0.0)  # no minus zero
