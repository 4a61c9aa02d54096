"""Column mass and energy: what keys receive."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic, added, padded_sum


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
        self.sunk = rows.sink is not None
        fused = rows.fused_sums()
        self._mass = padded_sum(self._mass, _mass(rows) if fused is None else fused.mass)
        self._energy = padded_sum(self._energy, _energy(rows) if fused is None else fused.energy)
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


def _mass(rows: Rows) -> Float[Tensor, "batch head key"]:
    mass = rows.sums().mass
    return mass if rows.sink is None else torch.cat([rows.sink.sum(-1, keepdim=True), mass], -1)


def _energy(rows: Rows) -> Float[Tensor, "batch head key"]:
    energy = rows.sums().energy
    if rows.self_attention and rows.n_key:
        own = rows.position.clamp_min(0)[:, None].expand(*rows.pattern.shape[:-1])
        energy = energy.scatter_add(-1, own, rows.diagonal().square())
    if rows.sink is None:
        return energy
    return torch.cat([rows.sink.square().sum(-1, keepdim=True), energy], -1)


def _seen(value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError("no rows have been seen yet: run the model, or call update, before reading results.")
    return value
