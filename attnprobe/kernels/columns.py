"""What keys receive, straight from queries and keys: column sums of A and of its squares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.functional.factored import Factors
from attnprobe.kernels.choice import can_fuse, row_blocks


class ColumnSums(NamedTuple):
    """Sums over the rows of a causal pattern A, in float32 (float64 where the factors are).

    Attributes:
        mass: [batch, head, key] sum_i A_ij.
        energy: [batch, head, key] sum_i A_ij^2.
        reciprocal: [batch, head] sum_i A_ii^2, which is tr(A^2).
        off_diagonal: [batch, head] sum_{i != j} A_ij^2, summed as it is.
    """

    mass: Float[Tensor, "batch head key"]
    energy: Float[Tensor, "batch head key"]
    reciprocal: Float[Tensor, "batch head"]
    off_diagonal: Float[Tensor, "batch head"]


@torch.no_grad()
def column_sums(factors: Factors, *, rows_at_once: int | None = None) -> ColumnSums:
    """Column mass and energy, and the squares on and off the diagonal, without the pattern.

    Padded rows add nothing. The last position of the keys need not be reached: keys that no row sees receive 0.

    Args:
        factors: queries [batch, head, query, d] and keys [batch, kv_head, key, d] of the pattern.
        rows_at_once: rows that the torch form computes at once, by default 64 or as few as make 8 million numbers. The
            Triton form has no such blocks.

    Returns:
        mass and energy [batch, head, key], reciprocal and off_diagonal [batch, head].

    Raises:
        ValueError: rows_at_once is below 1.

    Error: sums over blocks of rows are in float64 (torch form) or carry their rounding in float32 (Triton form), so
    the error does not grow with the number of rows; it is that of single weights in float32, which grows with the
    scores. Of 16k rows (torch form) the worst column was off by 4e-7 of its mass and 2e-6 of its energy where scores
    vary by 1, by 2e-5 and 3e-5 where they vary by 8; the two totals by 3e-7 at most.

    >>> import torch
    >>> q = torch.zeros(1, 1, 2, 16)
    >>> sums = column_sums(Factors(q, q, torch.arange(2)[None], kv_head=(0,), scaling=1.0))
    >>> sums.mass.tolist(), sums.energy.tolist(), sums.reciprocal.item(), sums.off_diagonal.item()
    ([[[1.5, 0.5]]], [[[1.25, 0.25]]], 1.25, 0.25)
    """
    if can_fuse(factors):
        return _triton_column_sums(factors)
    return _torch_column_sums(factors, rows_at_once=rows_at_once)


def _torch_column_sums(factors: Factors, *, rows_at_once: int | None = None) -> ColumnSums:
    """The definition: rows in blocks, each looked at up to the last key it can reach."""
    batch, heads = factors.q.shape[:2]
    device = factors.q.device
    wide = factors.dtype if device.type == "mps" else torch.float64  # mps has no float64
    mass, energy = torch.zeros(2, batch, heads, factors.k.shape[2], dtype=wide, device=device).unbind()
    reciprocal, off_diagonal = torch.zeros(2, batch, heads, dtype=wide, device=device).unbind()
    for block in row_blocks(factors, rows_at_once):
        rows = factors[block]
        pattern = rows.pattern()
        n_key = pattern.shape[-1]
        mass[..., :n_key] += pattern.sum(-2)
        squares = pattern.square_()
        energy[..., :n_key] += squares.sum(-2)
        own = rows.position.clamp_min(0)[:, None, :, None].expand(*squares.shape[:-1], 1)
        reciprocal += squares.gather(-1, own).sum((-2, -1))
        # total energy minus the diagonal would drown heads that look at themselves
        off_diagonal += squares.scatter_(-1, own, 0.0).sum((-2, -1))
    return ColumnSums(*(value.to(factors.dtype) for value in (mass, energy, reciprocal, off_diagonal)))


def _triton_column_sums(factors: Factors) -> ColumnSums:
    """No row leaves the chip; what blocks of keys have on and off the diagonal is added up by torch."""
    from attnprobe.kernels.tiles import Tiles

    mass, energy, own, other = Tiles.of(factors).columns()
    return ColumnSums(mass, energy, own.sum(-1), other.sum(-1))
