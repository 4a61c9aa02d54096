"""Mixtures of the rows of a pattern, straight from queries and keys."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.functional.factored import Factors
from attnprobe.kernels.choice import can_fuse, row_blocks


@torch.no_grad()
def sketch_rows(factors: Factors, signs: Float[Tensor, "batch rank query"]) -> Float[Tensor, "batch head rank key"]:
    """signs @ A, without A: line r of the sketch is sum_i signs_ri A_i.

    Args:
        factors: queries [batch, head, query, d] and keys [batch, kv_head, key, d] of the pattern.
        signs: [batch, rank, query] the weight of each row in each line, any floating dtype; often random signs, 0
            for padded rows (which are rows of zeros, whatever their sign).

    Returns:
        [batch, head, rank, key] in float32, float64 where the factors are.

    Raises:
        ValueError: signs are not [batch, rank, query] of the factors.

    Error: sums over blocks of rows are in float32, and carry their rounding in the Triton form. Of 16k rows with
    random signs (torch form) no number was off by more than 4e-6 of its column's norm (sum_i A_ij^2)^(1/2) where
    scores vary by 1, by 2e-5 where they vary by 8; that is the error of single weights.

    >>> import torch
    >>> q = torch.zeros(1, 1, 2, 16)
    >>> factors = Factors(q, q, torch.arange(2)[None], kv_head=(0,), scaling=1.0)
    >>> sketch_rows(factors, torch.tensor([[[1.0, 1.0], [1.0, -1.0]]])).tolist()
    [[[[1.5, 0.5], [0.5, -0.5]]]]
    """
    batch, _, n_query, _ = factors.q.shape
    if signs.ndim != 3 or (signs.shape[0], signs.shape[2]) != (batch, n_query):
        raise ValueError(
            f"signs are [batch, rank, query] = [{batch}, rank, {n_query}] for these factors; got {list(signs.shape)}."
        )
    if can_fuse(factors):
        return _triton_sketch_rows(factors, signs)
    return _torch_sketch_rows(factors, signs)


def _torch_sketch_rows(
    factors: Factors, signs: Float[Tensor, "batch rank query"], *, rows_at_once: int | None = None
) -> Float[Tensor, "batch head rank key"]:
    """The definition: rows in blocks, each looked at up to the last key it can reach."""
    batch, heads = factors.q.shape[:2]
    signs = signs.to(factors.dtype).unsqueeze(1)
    sketch = signs.new_zeros(batch, heads, signs.shape[2], factors.k.shape[2])
    for block in row_blocks(factors, rows_at_once):
        pattern = factors[block].pattern()
        sketch[..., : pattern.shape[-1]] += signs[..., block] @ pattern
    return sketch


def _triton_sketch_rows(
    factors: Factors, signs: Float[Tensor, "batch rank query"]
) -> Float[Tensor, "batch head rank key"]:
    """No row leaves the chip."""
    from attnprobe.kernels.tiles import Tiles

    return Tiles.of(factors).sketch(signs)
