"""Measures: the pair of weights (pi on queries, mu on keys) that fixes the geometry of an attention operator.

| measure      | pi  | mu                                                         |
|--------------|-----|------------------------------------------------------------|
| `intrinsic`  | 1/n | c/n, the column masses that the pattern itself induces     |
| `counting`   | 1   | 1                                                          |
| `positional` | 1/n | (1/n) sum_{i>=j} 1/i: what uniform causal attention induces |
| a tensor     | 1/n | the tensor: see `zipf_measure`, `unembedding_measure`       |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnprobe.functional.patterns import CheckedPattern, check_pattern, safe_divide

Measure = str | Tensor

MEASURES = ("intrinsic", "counting", "positional")

# Mandelbrot's shift of Zipf's law for word frequencies.
ZIPF_SHIFT = 2.7

_VOCABULARY_BLOCK = 8192


class KeyWeights(NamedTuple):
    """Weights of a measure on one pattern: `query` = pi [...], one for all rows, `key` = mu [..., key]."""

    query: Float[Tensor, "*batch"]
    key: Float[Tensor, "*batch key"]


def check_measure(measure: Measure) -> None:
    """Raise unless `measure` is the name of a measure that needs no tokens, or a tensor.

    Raises:
        ValueError: an unknown name, or a name whose weights depend on token ids.
        TypeError: neither a string nor a tensor.
    """
    if isinstance(measure, Tensor) or measure in MEASURES:
        return
    if not isinstance(measure, str):
        raise TypeError(f"measure must be a name or a tensor of key weights, not {type(measure).__name__}.")
    if measure == "zipf":
        raise ValueError("measure 'zipf' depends on the token ids: pass measure=zipf_measure(tokens).")
    if measure == "unembedding":
        raise ValueError(
            "measure 'unembedding' depends on the token ids: pass measure=unembedding_measure(tokens, "
            "leverage), with leverage=leverage_scores(unembedding)."
        )
    raise ValueError(
        f"measure {measure!r} is unknown; use {', '.join(map(repr, MEASURES))}, or a tensor of key weights "
        "(zipf_measure, unembedding_measure)."
    )


def check_measured(
    pattern: Float[Tensor, "*batch query key"], measure: Measure, *, rows: str, mask: Tensor | None
) -> CheckedPattern:
    """`check_pattern`, with what the measure asks of the pattern: `positional` needs a causal square one."""
    check_measure(measure)
    positional = isinstance(measure, str) and measure == "positional"
    return check_pattern(
        pattern,
        rows=rows,
        mask=mask,
        square=positional,
        causal=positional,
        why="the positional measure compares it with uniform causal attention over the same tokens",
    )


def key_weights(checked: CheckedPattern, measure: Measure) -> KeyWeights:
    """pi and mu of `measure` on a checked pattern, aligned with its columns; 0 = outside the space."""
    pattern = checked.pattern
    share = checked.length.to(pattern.dtype).reciprocal()
    if isinstance(measure, Tensor):
        return KeyWeights(share, _given_weights(checked, measure))
    mass = pattern.sum(-2)
    if measure == "counting":
        return KeyWeights(torch.ones_like(share), torch.ones_like(mass))
    if measure == "positional":
        return KeyWeights(share, positional_measure(pattern.shape[-1], checked.length, dtype=pattern.dtype))
    return KeyWeights(share, mass * share.unsqueeze(-1))


def _given_weights(checked: CheckedPattern, measure: Tensor) -> Float[Tensor, "*batch key"]:
    n_key = checked.pattern.shape[-1]
    if measure.ndim == 0 or measure.shape[-1] != n_key:
        extra = " (the sink, which is key 0, has a weight too)" if checked.sink else ""
        raise ValueError(
            f"the measure must have one weight for each of the {n_key} keys{extra}, but its shape is "
            f"{tuple(measure.shape)}."
        )
    weights = measure.to(checked.pattern).unsqueeze(-1)
    if checked.sink:
        aligned = checked.align_keys(weights[..., 1:, :], "the measure")
        aligned = torch.cat([weights[..., :1, :].expand(*checked.batch, 1, 1), aligned[..., 1:, :]], -2)
    else:
        aligned = checked.align_keys(weights, "the measure")
    aligned = aligned.squeeze(-1)
    if not (aligned.isfinite() & (aligned >= 0)).all() or not (aligned > 0).any(-1).all():
        raise ValueError(
            "the measure must hold finite key weights, none of them negative and not all of them 0; a "
            "weight of 0 drops the key."
        )
    return aligned


def positional_measure(
    n: int, length: Int[Tensor, "*batch"] | None = None, *, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "*batch key"]:
    """Key weights that uniform causal attention over `length` tokens induces.

        mu_j = (1/length) sum_{i=j}^{length} 1/i        (1-based j; 0 beyond the length)

    Args:
        n: number of keys.
        length: [...] number of real tokens of each sequence; n everywhere by default.
        dtype: dtype of the result; sums are taken in float64.

    Returns:
        [..., n], sum 1.

    Raises:
        ValueError: n < 1, or a length outside 1..n.

    >>> from attnprobe.functional import positional_measure
    >>> positional_measure(2).tolist()
    [0.75, 0.25]

    Source: [SG] the positional measure; that it is the pullback of uniform causal attention is our reading.
    """
    if n < 1:
        raise ValueError(f"a positional measure needs at least one key, not n={n}.")
    if length is None:
        length = torch.tensor(n)
    if ((length < 1) | (length > n)).any():
        raise ValueError(f"every length must lie in 1..{n}, the number of keys.")
    size = length.unsqueeze(-1)
    position = torch.arange(1, n + 1, device=length.device)
    steps = position.double().reciprocal().where(position <= size, 0.0)
    return (steps.flip(-1).cumsum(-1).flip(-1) / size).to(dtype)


def zipf_measure(
    tokens: Int[Tensor, "*batch key"],
    frequency_rank: Int[Tensor, "vocab"] | None = None,
    *,
    mask: Bool[Tensor, "*batch key"] | None = None,
) -> Float[Tensor, "*batch key"]:
    """Key weights that follow the Zipf-Mandelbrot law of word frequencies.

        mu_j proportional to 1 / (rank(token_j) + 2.7), sum 1

    Args:
        tokens: [..., key] token ids.
        frequency_rank: [vocab] rank of every token id, 0 = most frequent; by default the token id is the
            rank, which holds roughly for byte-pair vocabularies, whose merges are ordered by frequency.
        mask: [..., key] True = real token; padding gets weight 0 and the real tokens sum to 1.

    Returns:
        [..., key] float64, sum 1.

    Raises:
        ValueError: an empty or negative token id or rank, an id outside the table, or a sequence without a
            real token.

    >>> import torch
    >>> from attnprobe.functional import zipf_measure
    >>> [round(weight, 3) for weight in zipf_measure(torch.tensor([0, 1000])).tolist()]
    [0.997, 0.003]

    Source: [SG] the Zipf measure; token id as rank is our reading.
    """
    ids = _check_tokens(tokens, mask, None if frequency_rank is None else frequency_rank.shape[0])
    rank = ids if frequency_rank is None else frequency_rank.to(ids.device)[ids]
    if (rank < 0).any():
        raise ValueError("frequency ranks must be 0 or more.")
    return _normalized(1.0 / (rank.double() + ZIPF_SHIFT), mask)


def leverage_scores(unembedding: Float[Tensor, "vocab d"], rank: int | None = None) -> Float[Tensor, "vocab"]:
    """Leverage of every row of the unembedding matrix W: how much of its column space the row holds.

        l_i = sum_{k <= rank} U_ik^2,       W = U diag(s) V^T (thin SVD)

    U is not formed by an SVD of the vocabulary-sized matrix but as W V / s from the d x d Gram matrix, in
    float64.

    Args:
        unembedding: [vocab, d], one row a token.
        rank: how many leading singular directions count; all with a nonzero singular value by default.

    Returns:
        [vocab] float64 in [0, 1], sum = number of directions used.

    Raises:
        ValueError: not a finite matrix, a zero matrix, or a rank that is not in 1..rank(W).

    >>> import torch
    >>> from attnprobe.functional import leverage_scores
    >>> scores = leverage_scores(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    >>> [round(score, 6) for score in scores.tolist()]
    [1.0, 0.5, 0.5]

    Source: [SG] the unembedding measure.
    """
    if unembedding.ndim != 2 or not unembedding.isfinite().all():
        raise ValueError(
            "the unembedding must be a finite matrix [vocab, d], one row a token, not of shape "
            f"{tuple(unembedding.shape)}."
        )
    blocks = unembedding.split(_VOCABULARY_BLOCK)
    width = unembedding.shape[1]
    gram = torch.zeros(width, width, dtype=torch.float64, device=unembedding.device)
    for block in blocks:
        gram.addmm_(block.double().mT, block.double())
    squared, directions = torch.linalg.eigh(gram)
    # The Gram matrix is rounded at eps * s_max^2: directions below that are not told from zero.
    nonzero = squared > max(unembedding.shape) * torch.finfo(torch.float64).eps * squared[-1].clamp_min(0.0)
    available = int(nonzero.sum())
    if rank is None:
        rank = available
    if not 1 <= rank <= available:
        raise ValueError(f"rank must lie in 1..{available}, the rank of the unembedding, but it is {rank}.")
    scaled = directions[:, -rank:] / squared[-rank:].sqrt()
    return torch.cat([(block.double() @ scaled).square().sum(-1) for block in blocks])


def unembedding_measure(
    tokens: Int[Tensor, "*batch key"],
    leverage: Float[Tensor, "vocab"],
    *,
    mask: Bool[Tensor, "*batch key"] | None = None,
) -> Float[Tensor, "*batch key"]:
    """Key weights proportional to the leverage of each token's row of the unembedding matrix.

        mu_j = leverage[token_j] / sum

    Args:
        tokens: [..., key] token ids.
        leverage: [vocab] from `leverage_scores`.
        mask: [..., key] True = real token; padding gets weight 0 and the real tokens sum to 1.

    Returns:
        [..., key] float64, sum 1.

    Raises:
        ValueError: an id outside the table, a negative leverage, or a sequence whose leverage is all 0.

    >>> import torch
    >>> from attnprobe.functional import unembedding_measure
    >>> unembedding_measure(torch.tensor([0, 2, 2]), torch.tensor([0.5, 1.0, 0.25])).tolist()
    [0.5, 0.25, 0.25]

    Source: [SG] the unembedding measure; leverage from the thin SVD is our reading.
    """
    if leverage.ndim != 1 or not (leverage >= 0).all():
        raise ValueError(f"leverage must be [vocab] with no negative entry, not of shape {tuple(leverage.shape)}.")
    ids = _check_tokens(tokens, mask, leverage.shape[0])
    return _normalized(leverage.to(ids.device)[ids].double(), mask)


def _check_tokens(tokens: Tensor, mask: Tensor | None, vocabulary: int | None) -> Int[Tensor, "*batch key"]:
    """Token ids that can be looked up; padding, whose id may be anything, becomes 0."""
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be integer ids, not {tokens.dtype}.")
    if tokens.ndim == 0 or tokens.shape[-1] == 0:
        raise ValueError(f"tokens must be [..., key] with at least one key, not of shape {tuple(tokens.shape)}.")
    ids = tokens.long() if mask is None else tokens.long().where(mask, 0)
    if (ids < 0).any() or (vocabulary is not None and (ids >= vocabulary).any()):
        limit = "0 or more" if vocabulary is None else f"in 0..{vocabulary - 1}, the rows of the table"
        raise ValueError(f"token ids must be {limit}, but they run from {int(ids.min())} to {int(ids.max())}.")
    return ids


def _normalized(weights: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        weights = weights.where(mask, 0.0)
    total = weights.sum(-1, keepdim=True)
    if (total == 0).any():
        raise ValueError("a sequence has no key with a positive weight, so its weights cannot sum to 1.")
    return safe_divide(weights, total)
