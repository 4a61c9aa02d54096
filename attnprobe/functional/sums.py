"""What rows hold and keys receive, in one pass over a pattern.

Every sum here is bound by memory: four of them that each read a whole pattern cost four times the reading. Tiles of
the pattern that stay in the processor's cache are read from memory once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Entries of a tile: with its squares it fills a core's cache of 2 MB.
_TILE_ENTRIES = 1 << 18
# A tile has at least so many rows, where there are as many: sums down shorter columns are slow.
_TILE_ROWS = 64


class PatternSums(NamedTuple):
    """Sums over rows and columns of a pattern A.

    Attributes:
        row: [batch, head, query] sum_j A_ij.
        least: [batch, head, query] min_j A_ij (0 without keys).
        mass: [batch, head, key] sum_i A_ij.
        energy: [batch, head, key] sum_i A_ij^2, over i != j where tokens look at themselves.
    """

    row: Float[Tensor, "batch head query"]
    least: Float[Tensor, "batch head query"]
    mass: Float[Tensor, "batch head key"]
    energy: Float[Tensor, "batch head key"]


@torch.no_grad()
def pattern_sums(
    pattern: Float[Tensor, "batch head query key"], own: Int[Tensor, "batch query"] | None = None
) -> PatternSums:
    """Row sums and smallest weights, column sums and column sums of squares.

    Args:
        pattern: [batch, head, query, key], float32 or float64.
        own: [batch, query] the key that is the query's own token, -1 for none; its weight is left out of the energy.
            It is summed without rather than taken off, which would drown the rest where heads look at themselves.

    Returns:
        row and least [batch, head, query], mass and energy [batch, head, key], in the pattern's dtype.

    >>> import torch
    >>> pattern = torch.tensor([[1.0, 0.0], [0.5, 0.5]])[None, None]
    >>> sums = pattern_sums(pattern, torch.tensor([[0, 1]]))
    >>> sums.row.tolist(), sums.mass.tolist(), sums.energy.tolist()
    ([[[1.0, 1.0]]], [[[1.5, 0.5]]], [[[0.25, 0.0]]])
    """
    batch, heads, n_query, n_key = pattern.shape
    row, least = pattern.new_zeros(2, batch, heads, n_query).unbind()
    mass, energy = pattern.new_zeros(2, batch, heads, n_key).unbind()
    for head, query in _tiles(pattern) if n_key else ():
        tile = pattern[:, head, query]
        row[:, head, query] = tile.sum(-1)
        least[:, head, query] = tile.amin(-1)
        mass[:, head] += tile.sum(-2)
        squares = tile.square()
        if own is not None:
            there = own[:, None, query, None].clamp_min(0).expand(*tile.shape[:-1], 1)
            squares.scatter_(-1, there, 0.0)
        energy[:, head] += squares.sum(-2)
    return PatternSums(row, least, mass, energy)


def _tiles(pattern: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads and rows of each tile. An accelerator takes all at once."""
    batch, heads, n_query, n_key = pattern.shape
    entries = _TILE_ENTRIES if pattern.device.type == "cpu" else pattern.numel()
    rows = max(1, min(n_query, max(_TILE_ROWS, entries // (batch * n_key))))
    some = max(1, min(heads, entries // (batch * n_key * rows)))
    for head in range(0, heads, some):
        for query in range(0, n_query, rows):
            yield slice(head, head + some), slice(query, query + rows)
