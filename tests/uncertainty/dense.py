"""An independent float64 reference of the uncertainty scores, written from the definitions, loops and all.

Everything is computed from the full attention matrices [layer, head, n, n] of one eager forward of the
finished text and from its logits [n, vocab]. Nothing here imports attnprobe; indices are 0-based, steps
count t = 1..T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Text:
    """A finished text as the model saw it: attention, logits, and where the answer begins."""

    attention: np.ndarray  # [layer, head, n, n] float64
    logits: np.ndarray  # [n, vocab] float64
    ids: list[int]
    n_prompt: int
    leverage: np.ndarray | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.ids) - self.n_prompt

    def last_row(self, step: int) -> int:
        """The row whose query chose answer token `step`."""
        return self.n_prompt + step - 2


@dataclass
class Layer:
    layer: int
    head: int
    uncertainty: float
    signal: np.ndarray
    confidence: np.ndarray


def read_text(model, prompt, answer, *, renormalize_rows: bool = False) -> Text:
    """One eager forward of prompt + answer by a transformers model."""
    ids = [*prompt, *answer]
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    attention = np.stack([layer[0].double().numpy() for layer in out.attentions])
    if renormalize_rows:
        attention = attention / attention.sum(-1, keepdims=True)
    logits = out.logits[0].double().numpy()
    return Text(attention, logits, ids, len(prompt))


def leverage_of(model) -> np.ndarray:
    """Leverage score of every row of the unembedding matrix, from its thin SVD."""
    weight = model.get_output_embeddings().weight.detach().double().numpy()
    left, singular, _ = np.linalg.svd(weight, full_matrices=False)
    left = left[:, singular > singular[0] * 1e-10]
    return (left**2).sum(1)


# --- tokens ----------------------------------------------------------------------------------------------


def token_log_probabilities(text: Text) -> np.ndarray:
    values = []
    for step in range(1, text.n_tokens + 1):
        row = text.logits[text.last_row(step)]
        token = text.ids[text.n_prompt + step - 1]
        values.append(row[token] - row.max() - math.log(np.exp(row - row.max()).sum()))
    return np.array(values)


def token_entropies(text: Text) -> np.ndarray:
    values = []
    for step in range(1, text.n_tokens + 1):
        row = text.logits[text.last_row(step)]
        p = np.exp(row - row.max())
        p /= p.sum()
        p = p[p > 0]
        values.append(-(p * np.log(p)).sum())
    return np.array(values)


def perplexity(text: Text) -> float:
    return float(np.mean([-value for value in token_log_probabilities(text)]))


def mean_token_entropy(text: Text) -> float:
    return float(np.mean(token_entropies(text)))


def maximum_sequence_probability(text: Text) -> float:
    return -float(sum(token_log_probabilities(text)))


def maximum_token_entropy(text: Text) -> float:
    return float(max(token_entropies(text)))


# --- the diagonal ----------------------------------------------------------------------------------------


def mean_laplacian_eigenvalue(block: np.ndarray, clip: str = "each") -> float:
    """Mean of L_ii = (sum_{u >= i} a_ui) / (n - i) - a_ii, clipped to [0, 1] one by one or as it is."""
    n = len(block)
    values = [block[i:, i].sum() / (n - i) - block[i, i] for i in range(n)]
    if clip == "each":
        values = [min(max(value, 0.0), 1.0) for value in values]
    return min(max(sum(values) / n, 0.0), 1.0)


def geometric_mean_self_attention(block: np.ndarray, epsilon: float = 0.0) -> float:
    weights = [block[i, i] + epsilon for i in range(len(block))]
    if min(weights) == 0:
        return 0.0
    return min(math.exp(sum(math.log(weight) for weight in weights) / len(block)), 1.0)


def attention_score(text: Text, *, layer: int | None = None, generation_only: bool = False) -> float:
    """Of prompt and generation to its last token; or of the generated tokens but the last."""
    n_layers, n_heads, n, _ = text.attention.shape
    layer = n_layers // 2 if layer is None else layer
    tokens = range(text.n_prompt, n - 1) if generation_only else range(n)
    logs = [math.log(text.attention[layer, head, t, t] + 1e-12) for head in range(n_heads) for t in tokens]
    return -sum(logs) / n_heads


# --- participation ratio ---------------------------------------------------------------------------------


def participation_ratio(block: np.ndarray, measure: str, tokens, leverage) -> float:
    """(tr S)^2 / (n ||S||_F^2) of S = Omega_mu^-1/2 A^T Omega_pi A Omega_mu^-1/2."""
    n = len(block)
    pi = 1.0 if measure == "counting" else 1.0 / n
    if measure == "intrinsic":
        mu = block.sum(0) / n
    elif measure == "counting":
        mu = np.ones(n)
    elif measure == "positional":
        mu = np.array([sum(1 / i for i in range(j, n + 1)) / n for j in range(1, n + 1)])
    elif measure == "zipf":
        mu = np.array([1 / (token + 2.7) for token in tokens])
        mu /= mu.sum()
    elif measure == "unembedding":
        mu = np.array([leverage[token] for token in tokens])
        mu /= mu.sum()
    else:
        raise AssertionError(measure)
    inside = mu > 0
    kept = block[:, inside]
    root = 1 / np.sqrt(mu[inside])
    s = pi * (kept.T @ kept) * root[:, None] * root[None, :]
    return float(np.trace(s) ** 2 / (n * (s**2).sum()))


def prefix_block(text: Text, layer: int, head: int, step: int) -> np.ndarray:
    end = text.last_row(step) + 1
    return text.attention[layer, head, :end, :end]


def generation_block(text: Text, layer: int, head: int, step: int, renormalize: bool) -> np.ndarray:
    start, end = text.n_prompt, text.last_row(step) + 1
    block = text.attention[layer, head, start:end, start:end].copy()
    if renormalize:
        for row in block:
            row /= row.sum()
    return block


# --- the recurrence --------------------------------------------------------------------------------------


def middle_layers(n_layers: int) -> list[int]:
    return [layer for layer in range(n_layers // 3, math.ceil(2 * n_layers / 3) + 1) if layer < n_layers]


def recurrence(weight, signal, alpha: float) -> np.ndarray:
    confidence = [weight[0]]
    for t in range(1, len(weight)):
        confidence.append(alpha * weight[t] + (1 - alpha) * signal[t] * confidence[-1])
    return np.array(confidence)


def first_best(values) -> int:
    """argmax where ties, up to rounding, go to the lowest index."""
    best = max(values)
    return next(i for i, value in enumerate(values) if value >= best - 1e-9)


def _score(layers: list[int], choose, signal_of, weight, alpha: float) -> tuple[float, list[Layer]]:
    found = []
    for layer in layers:
        head = choose(layer)
        signal = np.array([math.nan] + [signal_of(layer, head, t) for t in range(2, len(weight) + 1)])
        confidence = recurrence(weight, signal, alpha)
        uncertainty = 1 - np.mean([math.log(c) for c in confidence])
        found.append(Layer(layer, head, float(uncertainty), signal, confidence))
    return max(layer.uncertainty for layer in found), found


def sauq(
    text: Text,
    *,
    alpha: float = 0.2,
    layers=None,
    measure: str = "intrinsic",
    scope: str = "prefix",
    screen: str = "final",
    renormalize: bool = True,
    signal=None,
) -> tuple[float, list[Layer]]:
    """SAUQ; or, with `signal`, a function of the prefix block, the same at the same heads with that signal."""
    n_layers, n_heads = text.attention.shape[:2]
    steps = text.n_tokens

    def ratio(block: np.ndarray, start: int) -> float:
        return participation_ratio(block, measure, text.ids[start : start + len(block)], text.leverage)

    def of_prefix(layer: int, head: int, step: int) -> float:
        return ratio(prefix_block(text, layer, head, step), 0)

    def of_generation(layer: int, head: int, step: int) -> float:
        return ratio(generation_block(text, layer, head, step, renormalize), text.n_prompt)

    def choose(layer: int) -> int:
        if steps == 1:
            return first_best([of_prefix(layer, head, 1) for head in range(n_heads)])
        if screen == "final":
            return first_best([of_generation(layer, head, steps) for head in range(n_heads)])
        return first_best(
            [np.mean([of_generation(layer, head, t) for t in range(2, steps + 1)]) for head in range(n_heads)]
        )

    chosen = middle_layers(n_layers) if layers is None else list(layers)
    signal_of = of_prefix if scope == "prefix" else of_generation
    if signal is not None:

        def signal_of(layer: int, head: int, step: int) -> float:
            return signal(prefix_block(text, layer, head, step))

    return _score(chosen, choose, signal_of, np.exp(token_log_probabilities(text)), alpha)


def rauq(
    text: Text,
    *,
    alpha: float | None = None,
    layers=None,
    indexing: str = "lm-polygraph",
    entropy: bool = False,
) -> tuple[float, list[Layer]]:
    n_layers, n_heads = text.attention.shape[:2]
    steps = text.n_tokens

    def signal_of(layer: int, head: int, step: int) -> float:
        if indexing == "lm-polygraph":  # the position that chose the token, to itself
            row = text.last_row(step)
            return text.attention[layer, head, row, row]
        row = text.n_prompt + step - 1  # the token itself, to the one before it
        return text.attention[layer, head, row, row - 1]

    def choose(layer: int) -> int:
        if steps == 1:
            return 0
        means = [np.mean([signal_of(layer, h, t) for t in range(2, steps + 1)]) for h in range(n_heads)]
        return first_best(means)

    weight = np.exp(token_log_probabilities(text))
    if entropy:
        weight = math.log(text.logits.shape[1]) - token_entropies(text) + 1e-10
    if alpha is None:
        alpha = 0.8 if entropy else 0.2
    chosen = middle_layers(n_layers) if layers is None else list(layers)
    return _score(chosen, choose, signal_of, weight, alpha)


def assert_same_layers(assessment, layers: list[Layer], tolerance: float) -> None:
    """An assessment of attnprobe against the reference: every layer's head, score, signal and confidence."""
    assert [trace.layer for trace in assessment.layers] == [layer.layer for layer in layers]
    assert [trace.head for trace in assessment.layers] == [layer.head for layer in layers]
    for trace, layer in zip(assessment.layers, layers, strict=True):
        assert abs(trace.uncertainty - layer.uncertainty) < tolerance, layer.layer
        assert trace.signal.shape == layer.signal.shape
        assert trace.confidence.shape == layer.confidence.shape
        np.testing.assert_allclose(trace.signal[1:], layer.signal[1:], atol=tolerance, rtol=0)
        np.testing.assert_allclose(trace.confidence, layer.confidence, atol=tolerance, rtol=0)
