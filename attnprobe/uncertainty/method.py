"""What a score is: the analyzers it needs, and a number from the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnprobe.analyzers.base import Analyzer
from attnprobe.probe import Probe
from attnprobe.uncertainty.evidence import Evidence

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LayerTrace:
    """A recurrent score at one layer, step by step.

    Attributes:
        layer, head: where (the head chosen there).
        uncertainty: the layer's own score.
        signal: [step] routing signal of the head (entry 0 is not used by the recurrence).
        confidence: [step] running confidence c_t.
    """

    layer: int
    head: int
    uncertainty: float
    signal: np.ndarray
    confidence: np.ndarray


@dataclass(frozen=True)
class Assessment:
    """A score of one answer; higher = less certain.

    Attributes:
        uncertainty: the score.
        layers: for recurrent scores, every layer; the one with the largest uncertainty set the score.
    """

    uncertainty: float
    layers: tuple[LayerTrace, ...] = field(default=())

    @property
    def deciding(self) -> LayerTrace | None:
        """The layer that set the score, None for scores without layers."""
        return max(self.layers, key=lambda layer: layer.uncertainty, default=None)

    def table(self) -> pd.DataFrame:
        """Long table: layer, head, step, signal, confidence; empty for scores without layers."""
        import pandas as pd

        return pd.DataFrame(
            [
                (trace.layer, trace.head, step + 1, trace.signal[step], trace.confidence[step])
                for trace in self.layers
                for step in range(len(trace.confidence))
            ],
            columns=["layer", "head", "step", "signal", "confidence"],
        )


class Method:
    """Base class of scores of one answer from a single pass.

    Attributes:
        name: how the score is called in results.
        layers: which layers it reads: "middle", "center" (L//2), "all", or numbers.
        needs_last_row: it reads the row of the last generated token itself, which takes one more forward.
    """

    name: str
    layers: str | tuple[int, ...] = ()
    needs_last_row: bool = False

    def analyzers(self) -> list[Analyzer]:
        """The analyzers whose traces the score reads."""
        return []

    def assess(self, evidence: Evidence) -> Assessment:
        """The score of one answer."""
        raise NotImplementedError

    def probe(self, **settings: Any) -> Probe:
        """A probe that keeps what this score reads; `settings` go to `Probe`."""
        analyzers = self.analyzers()
        if not analyzers:
            raise ValueError(f"{self.name} reads token probabilities only: use attnprobe.score.")
        return Probe(analyzers, logits=True, **{"layers": self.layers, **settings})

    def score(self, probe: Probe, tokens: Any = None, *, sequences: Sequence[int] | None = None) -> list[Assessment]:
        """Score the sequences that an attached probe has seen.

        Args:
            probe: a probe with this score's analyzers and `logits=True`, after the model has generated.
            sequences: which of them, all by default.
            tokens: the generated ids [batch, step] of the last call, where the probe could not see the last of them
                (a `generate` that returns text; the whole output with its prompt will do as well).

        Raises:
            ValueError: traces or token probabilities are missing.
            TypeError: tokens that are no ids [batch, step].
        """
        if tokens is not None:
            ids = torch.as_tensor(tokens) if isinstance(tokens, torch.Tensor | np.ndarray | list) else None
            if ids is None or ids.ndim != 2 or ids.is_floating_point():
                raise TypeError("tokens are the generated ids [batch, step], whole numbers; give no text here.")
            probe.last_tokens(ids[:, -1])
        results = probe.results()
        chosen = range(results.sizes["sequence"]) if sequences is None else sequences
        return [self.assess(Evidence.of(results, i)) for i in chosen]
