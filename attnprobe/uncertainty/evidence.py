"""What a score may look at: one answer's token probabilities and the traces of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Evidence:
    """One answer.

    Attributes:
        log_probability: [step] of each generated token, nats.
        entropy: [step] of the next-token distribution that gave it, nats.
        traces: variable -> [layer, head, step or more]: entry t - 1 belongs to the row that chose token t, and one more
            entry, where there is one, to the row of the last token itself.
        heads: the watched head numbers.
        layers: the watched layer numbers; n_layers: how many the model has; attention_layers: those with
            attention (the watched ones if not given).
        vocabulary: size of the model's vocabulary.
    """

    log_probability: np.ndarray
    entropy: np.ndarray
    traces: Mapping[str, np.ndarray]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    n_layers: int
    vocabulary: int
    attention_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "attention_layers", self.attention_layers or self.layers)

    @classmethod
    def of(cls, results: xr.Dataset, sequence: int, n_tokens: int | None = None) -> Evidence:
        """One sequence of a probe's results.

        Args:
            results: of a probe with `logits=True`.
            sequence: which.
            n_tokens: how many tokens were generated; by default as many as there are steps.

        Raises:
            ValueError: no token probabilities, or the last token is not known.
        """
        if "token_log_probability" not in results:
            raise ValueError("these results hold no token probabilities: make the probe with logits=True.")
        one = results.isel(sequence=sequence)
        entropy = one["token_entropy"].values.astype(np.float64)
        if n_tokens is None:
            n_tokens = int(np.isfinite(entropy).sum())
        log_probability = one["token_log_probability"].values.astype(np.float64)[:n_tokens]
        if not n_tokens or np.isnan(entropy[:n_tokens]).any():
            raise ValueError(f"sequence {sequence} has no generated tokens: there is nothing to be uncertain about.")
        if np.isnan(log_probability).any():
            raise ValueError(
                f"the last token of sequence {sequence} was chosen outside the probe's sight (generate returned text, "
                "or was not used): pass tokens=, the generated token ids."
            )
        traces = {
            str(name)[: -len("_trace")]: variable.values.astype(np.float64)
            for name, variable in one.data_vars.items()
            if str(name).endswith("_trace")
        }
        return cls(
            log_probability=log_probability,
            entropy=entropy[:n_tokens],
            traces=traces,
            layers=tuple(int(layer) for layer in one["layer"].values),
            heads=tuple(int(head) for head in one["head"].values),
            n_layers=int(results.attrs["n_layers"]),
            attention_layers=tuple(int(layer) for layer in np.atleast_1d(results.attrs["attention_layers"])),
            vocabulary=int(results.attrs["vocabulary"]),
        )

    @property
    def n_tokens(self) -> int:
        """Number of generated tokens T."""
        return len(self.log_probability)

    def trace(self, name: str, layers: tuple[int, ...]) -> np.ndarray:
        """[layer, head, step] of one variable at the given layers.

        Raises:
            ValueError: the variable or a layer was not watched.
        """
        if name not in self.traces:
            raise ValueError(
                f"this score reads the trace of {name!r} and there is none (there are {', '.join(self.traces) or 'no'} "
                "traces): is the name that of a result, has the analyzer trace=True, and was the probe made with the "
                "score's own analyzers (`score.probe()`, or `Probe([*score.analyzers(), ...], logits=True)`)?"
            )
        missing = sorted(set(layers) - set(self.layers))
        if missing:
            raise ValueError(
                f"this score reads layers {layers[0]} to {layers[-1]} and the probe did not watch {missing}: make the "
                "probe with layers='middle' or layers='all'."
            )
        rows = [self.layers.index(layer) for layer in layers]
        value: np.ndarray = self.traces[name][rows]
        return value

    def trace_through_last_row(self, name: str, layers: tuple[int, ...], method: str) -> np.ndarray:
        """[layer, head, step + 1] of one variable, the row of the last generated token itself included.

        Raises:
            ValueError: as `trace`, or that row was never read; `method` is the score that the sentence names.
        """
        trace = self.trace(name, layers)
        # a layer of fewer heads than another is filled with NaN
        if trace.shape[-1] <= self.n_tokens or np.isnan(trace[..., self.n_tokens]).all(-1).any():
            raise ValueError(
                f"{method} reads the row of the last generated token, which was never fed to the model: use "
                "attnprobe.score, or feed the finished text once more."
            )
        return trace[..., : self.n_tokens + 1]
