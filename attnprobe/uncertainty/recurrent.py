"""Scores by recurrence: c_t = a p_t + (1 - a) s_t c_{t-1}, where the routing signal s is the part that is swapped.

U_l = 1 - (1/T) sum_t log c_t at every layer, U = max over layers.

A score of one's own is a short class:

>>> import attnprobe as ap
>>> class SelfAttentionUQ(ap.Recurrent):
...     "Carried over by what the token that chose gives to itself."
...     name = "SelfAttentionUQ"
...     signal = "self_attention"
...     def analyzers(self):
...         return [ap.SelfAttention(trace=True)]
>>> SelfAttentionUQ(alpha=0.5).alpha
0.5

An object of it goes into `score(model, prompts, methods=[SelfAttentionUQ()])`.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch

from attnprobe.functional.recurrence import ABOVE_ONE, recurrent_log_confidence
from attnprobe.functional.screening import first_largest
from attnprobe.probe_settings import check_layers, middle_layers
from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.method import Assessment, LayerTrace, Method


class Recurrent(Method):
    """The recurrence. A subclass names its analyzers and the trace that is its signal.

    What a subclass writes:
        name: how the score is called in results.
        analyzers(): the analyzers that it reads, with `trace=True`.
        signal: the name of the result of theirs that is the signal; or, where the trace is not the signal as it
            is, the method `signals(evidence, layers)`.
        choose_heads(evidence, layers): only where the head of a layer is another than the one with the largest mean
            signal. `attnprobe.ScreenedRecurrent` is the base for the heads that SAUQ reads.
        log_weights(evidence): only where something else than p_t enters.

    Args:
        alpha: weight of the token's own probability against what is carried over, in [0, 1].
        layers: "middle" (default: L//3 to ceil(2L/3) inclusive), "all", or layer numbers.

    Raises:
        ValueError: alpha outside [0, 1], or no such layers.
    """

    signal: str

    def __init__(self, *, alpha: float = 0.2, layers: str | Sequence[int] = "middle") -> None:
        if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha!r} weighs a probability against a carried confidence: use 0 to 1.")
        if isinstance(layers, str) and layers not in ("middle", "all"):
            raise ValueError(f"layers={layers!r}: use 'middle', 'all' or a list of layer numbers.")
        self.alpha: float = float(alpha)
        self.layers = check_layers(layers)

    def signals(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        """[layer, head, step] routing signals s_t in [0, 1]; step 1 is not used.

        By default the trace called `signal`: s_t is the value at the row that chose token t.
        """
        if not hasattr(self, "signal"):
            raise NotImplementedError(
                f"{type(self).__name__} must name its signal, the trace of one of its analyzers, or define "
                "signals(self, evidence, layers)."
            )
        return evidence.trace(self.signal, layers)[..., : evidence.n_tokens]

    def choose_heads(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        """[layer] the head whose signal is read, as an index into the watched heads.

        By default the one with the largest mean signal over the steps that use one, the lowest of a tie.
        """
        if evidence.n_tokens == 1:
            return np.zeros(len(layers), dtype=np.int64)
        return largest_head(self.signals(evidence, layers)[..., 1:].mean(-1), 0.0)

    def log_weights(self, evidence: Evidence) -> np.ndarray:
        """[step] log of what stands for p_t in the recurrence."""
        return evidence.log_probability

    def assess(self, evidence: Evidence) -> Assessment:
        """The score of one answer, with signal and confidence of every layer.

        Raises:
            ValueError: a trace or a layer is missing, or a signal is no number in [0, 1].
        """
        layers = self._layer_numbers(evidence)
        heads = self.choose_heads(evidence, layers)
        signal = self.signals(evidence, layers)[np.arange(len(layers)), heads]
        if np.isnan(signal[:, 1:]).any():
            raise ValueError(
                f"{self.name} has no signal of the head it reads at some step: let the probe follow one generation "
                "as a whole, and pass as many tokens as were generated."
            )
        _check_range(self.name, signal, layers, [evidence.heads[head] for head in heads])
        weights = np.broadcast_to(self.log_weights(evidence), signal.shape)
        log_confidence = recurrent_log_confidence(
            torch.from_numpy(weights.copy()), torch.from_numpy(signal.copy()), self.alpha
        ).numpy()
        uncertainty = 1 - log_confidence.mean(-1)
        traces = tuple(
            LayerTrace(layer, evidence.heads[head], float(u), s, np.exp(c))
            for layer, head, u, s, c in zip(layers, heads, uncertainty, signal, log_confidence, strict=True)
        )
        return Assessment(float(uncertainty.max()), traces)

    def _layer_numbers(self, evidence: Evidence) -> tuple[int, ...]:
        if self.layers == "middle":
            middle = middle_layers(evidence.n_layers)
            return tuple(layer for layer in middle if layer in evidence.attention_layers)
        if self.layers == "all":
            return evidence.attention_layers
        return tuple(int(layer) for layer in self.layers)


def _check_range(name: str, signal: np.ndarray, layers: Sequence[int], heads: Sequence[int]) -> None:
    """Raise where a signal [layer, step] that is used is no share."""
    wrong = (signal[:, 1:] < 0) | (signal[:, 1:] > 1 + ABOVE_ONE)
    if wrong.any():
        i, step = np.argwhere(wrong)[0]
        raise ValueError(
            f"the signal of {name} is {signal[i, step + 1]:.6g} in layer {layers[i]}, head {heads[i]}, step "
            f"{step + 2}: a routing signal is a number from 0 to 1."
        )


def largest_head(values: np.ndarray, tolerance: float) -> np.ndarray:
    """[layer] lowest head whose value [layer, head] is the largest but for rounding."""
    first: np.ndarray = first_largest(torch.from_numpy(values.copy()), tolerance).numpy()
    return first
