"""Column mass and energy: what keys receive."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic, added, padded_sum

_ROWS_AT_ONCE = 64


class Columns(Statistic):
    """c_j = sum_i A_ij and q_j = sum_i A_ij^2, and the number of rows. O(n) memory a head, O(n) time a row.

    Attributes (None before the first row):
        mass, energy: [batch, head, key]; with a sink, the sink is key 0 (`Rows.keys`).
        count: [batch] rows so far.
        sunk: the rows carry a sink that is not a token.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mass: Tensor | None = None
        self._energy: Tensor | None = None
        self._count: Tensor | None = None
        self.sunk = False

    @property
    def empty(self) -> bool:
        """No row has come yet."""
        return self._count is None

    @property
    def mass(self) -> Float[Tensor, "batch head key"]:
        return _seen(self._mass)

    @property
    def energy(self) -> Float[Tensor, "batch head key"]:
        return _seen(self._energy)

    @property
    def count(self) -> Int[Tensor, "batch"]:
        return _seen(self._count)

    def _update(self, rows: Rows) -> None:
        keys = rows.keys
        self.sunk = rows.sink is not None
        self._mass = padded_sum(self._mass, keys.sum(-2))
        reach = rows.first + (rows.sink is not None) if rows.causal else None
        self._energy = padded_sum(self._energy, _column_energy(keys, reach))
        self._count = added(self._count, rows.count)

    def _merge(self, other: Statistic) -> None:
        assert isinstance(other, Columns)
        if other.empty:
            return
        self.sunk = other.sunk
        self._mass = padded_sum(self._mass, other.mass)
        self._energy = padded_sum(self._energy, other.energy)
        self._count = added(self._count, other.count)

    def before(self, rows: Rows) -> tuple[Float[Tensor, "batch head key"], Float[Tensor, "batch head key"]]:
        """Mass and energy before these rows, on the keys these rows have (zeros where nothing was seen)."""
        zeros = rows.pattern.new_zeros((*rows.pattern.shape[:2], rows.keys.shape[-1]))
        if self.empty:
            return zeros, zeros
        return padded_sum(zeros.clone(), self.mass), padded_sum(zeros.clone(), self.energy)


def _column_energy(keys: Float[Tensor, "batch head query key"], reach: int | None) -> Float[Tensor, "batch head key"]:
    """Sums of squares down the columns; in blocks of rows, so that the squares of a long prompt are never all there.

    `reach` = r promises that row i has no mass beyond key r + i, so a block is not looked at beyond its last row's.
    """
    energy = keys.new_zeros((*keys.shape[:-2], keys.shape[-1]))
    for low in range(0, keys.shape[-2], _ROWS_AT_ONCE):
        high = keys.shape[-1] if reach is None else reach + low + _ROWS_AT_ONCE
        block = keys[..., low : low + _ROWS_AT_ONCE, :high]
        energy[..., : block.shape[-1]] += block.square().sum(-2)
    return energy


def _seen(value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError("no rows have been seen yet: run the model, or call update, before reading results.")
    return value
