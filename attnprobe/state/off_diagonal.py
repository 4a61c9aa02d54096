"""Energy off the diagonal: what tokens give to others."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic, added


class OffDiagonal(Statistic):
    """sum_{i != j} A_ij^2, summed as it is: total energy minus diagonal would drown it where heads look at themselves.

    O(1) memory a head, float64.

    Attributes:
        energy: [batch, head].
    """

    def __init__(self) -> None:
        super().__init__()
        self._energy: Tensor | None = None

    @property
    def energy(self) -> Float[Tensor, "batch head"]:
        if self._energy is None:
            raise ValueError("no rows have been seen yet: run the model, or call update, first.")
        return self._energy

    def by_row(self, rows: Rows) -> Float[Tensor, "batch head query"]:
        """The energy of each of a few rows."""
        own = rows.position[:, None, :, None].clamp_min(0).expand(*rows.pattern.shape[:-1], 1)
        return rows.pattern.square().scatter_(-1, own, 0.0).sum(-1).double()

    def before(self, rows: Rows) -> Float[Tensor, "batch head"]:
        """The sum before these rows."""
        if self._energy is None:
            return torch.zeros(rows.pattern.shape[:2], dtype=torch.float64, device=rows.pattern.device)
        return self._energy

    def _update(self, rows: Rows) -> None:
        fused = rows.fused_sums()
        energy = rows.sums().energy.sum(-1, dtype=torch.float64) if fused is None else fused.off_diagonal
        self._energy = added(self._energy, energy.double())

    def _merge(self, other: Statistic) -> None:
        assert isinstance(other, OffDiagonal)
        self._energy = added(self._energy, other._energy)
