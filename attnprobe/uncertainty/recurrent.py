"""Scores by recurrence: c_t = a p_t + (1 - a) s_t c_{t-1}, where the routing signal s is the part that is swapped.

U_l = 1 - (1/T) sum_t log c_t at every layer, U = max over layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attnprobe.analyzers import Analyzer, PreviousTokenAttention, ScreenedTDO, SelfAttention
from attnprobe.analyzers.screened import BLOCK_TIE, PREFIX_TIE
from attnprobe.functional.recurrence import recurrent_log_confidence
from attnprobe.functional.screening import first_largest
from attnprobe.probe_settings import middle_layers
from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.method import Assessment, LayerTrace, Method


class Recurrent(Method):
    """The recurrence. A subclass names its analyzers, the signal, and the head of every layer.

    Args:
        alpha: weight of the token's own probability against what is carried over, in [0, 1].
        layers: "middle" (default: L//3 to ceil(2L/3) inclusive), "all", or layer numbers.
    """

    def __init__(self, *, alpha: float = 0.2, layers: str | Sequence[int] = "middle") -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha} weighs a probability against a carried confidence: use 0 to 1.")
        if isinstance(layers, str) and layers not in ("middle", "all"):
            raise ValueError(f"layers={layers!r}: use 'middle', 'all' or a list of layer numbers.")
        self.alpha = alpha
        self.layers = layers if isinstance(layers, str) else tuple(int(layer) for layer in layers)

    def signals(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        """[layer, head, step] routing signals s_t in [0, 1]; step 1 is not used."""
        raise NotImplementedError

    def choose_heads(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        """[layer] the head whose signal is read, as an index into the watched heads."""
        raise NotImplementedError

    def log_weights(self, evidence: Evidence) -> np.ndarray:
        """[step] log of what stands for p_t in the recurrence."""
        return evidence.log_probability

    def assess(self, evidence: Evidence) -> Assessment:
        layers = self._layer_numbers(evidence)
        heads = self.choose_heads(evidence, layers)
        signal = self.signals(evidence, layers)[np.arange(len(layers)), heads]
        if np.isnan(signal[:, 1:]).any():
            raise ValueError(
                f"{self.name} has no signal of the head it reads at some step: let the probe follow one generation "
                "as a whole, and pass as many tokens as were generated."
            )
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


class SAUQ(Recurrent):
    """Spectral attention uncertainty: the signal is the participation ratio of one head's pattern at each step.

        c_1 = p_1,    c_t = alpha p_t + (1 - alpha) s_t c_{t-1},    U_l = 1 - (1/T) sum_t log c_t,    U = max_l U_l

    c_t is the running confidence, so U is at least 1, where the model was sure of everything.

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
        super().__init__(alpha=alpha, layers=layers)
        if scope not in ("prefix", "generation"):
            raise ValueError(f"unknown scope {scope!r}: use 'prefix' or 'generation'.")
        if screen not in ("final", "mean"):
            raise ValueError(f"unknown screen {screen!r}: use 'final' or 'mean'.")
        self.measure = measure
        self.scope = scope
        self.screen = screen
        self.renormalize = renormalize
        # it checks the measure, and its names are how the traces are found
        block = "generation" if renormalize else "generation-raw"
        self._screened = ScreenedTDO(measure, block=block, screen=screen, stride=stride)
        self.name = "-".join(
            ["SAUQ"]
            + (["generation"] if scope == "generation" else [])
            + ([measure] if measure != "intrinsic" else [])
            + ([] if renormalize else ["raw"])
            + ([] if screen == "final" else ["mean"])
            + ([] if stride == 1 else [f"stride{stride}"])
        )

    def analyzers(self) -> list[Analyzer]:
        return [self._screened]

    def signals(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        name = self._screened.prefix_name if self.scope == "prefix" else self._screened.block_name
        return evidence.trace(name, layers)[..., : evidence.n_tokens]

    def choose_heads(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        n = evidence.n_tokens
        if n == 1:  # the prefix ratio is float32
            return _first_largest(evidence.trace(self._screened.prefix_name, layers)[..., 0], PREFIX_TIE)
        if self.screen == "final":
            ratio = evidence.trace(self._screened.block_name, layers)[..., n - 1]
        else:
            ratio = evidence.trace(self._screened.block_name, layers)[..., 1:n].mean(-1)
        return _first_largest(ratio, BLOCK_TIE)


class RAUQ(Recurrent):
    """Recurrent attention uncertainty: the recurrence of `SAUQ` with the attention to the previous token as signal.

    The head of a layer is the one with the largest mean signal over the steps.

    Args:
        alpha: weight of the token's probability; 0.2, or 0.8 with `entropy=True`. The published settings for
            instruction-tuned models are 0.5 and 0.9.
        layers: "middle" (default), "all" or layer numbers.
        indexing: "lm-polygraph" (default), what the published benchmark code computes: the attention to itself of the
            position that chose the token; "paper": the attention of the token to the one before it, which needs one
            more forward for the last token's row.
        entropy: log|V| - H_t + 1e-10 takes the place of p_t; scores can then be negative.

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
        return [PreviousTokenAttention(trace=True) if self.indexing == "paper" else SelfAttention(trace=True)]

    def signals(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        n = evidence.n_tokens
        if self.indexing == "lm-polygraph":
            return evidence.trace("self_attention", layers)[..., :n]
        trace = evidence.trace("previous_token_attention", layers)
        if n > 1 and (trace.shape[-1] <= n or np.isnan(trace[..., n]).any()):
            raise ValueError(
                "RAUQ with indexing='paper' reads the row of the last generated token, which was never fed to the "
                "model: use attnprobe.score, or feed the finished text once more."
            )
        return trace[..., 1 : n + 1] if n > 1 else trace[..., :1]

    def choose_heads(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        if evidence.n_tokens == 1:
            return np.zeros(len(layers), dtype=np.int64)
        return _first_largest(self.signals(evidence, layers)[..., 1:].mean(-1), 0.0)

    def log_weights(self, evidence: Evidence) -> np.ndarray:
        if not self.entropy:
            return evidence.log_probability
        return np.log(np.maximum(np.log(evidence.vocabulary) - evidence.entropy, 0.0) + 1e-10)


def _first_largest(values: np.ndarray, tolerance: float) -> np.ndarray:
    """[layer] lowest head whose value [layer, head] is the largest but for rounding."""
    first: np.ndarray = first_largest(torch.from_numpy(values.copy()), tolerance).numpy()
    return first
