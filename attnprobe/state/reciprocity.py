"""Mutual attention: what a token gives to those that give to it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic, added


class Reciprocity(Statistic):
    """tr(A^2) = sum_ij A_ij A_ji, which for a causal pattern is the sum of squared self-attention weights.

    O(1) memory a head. Bidirectional patterns pair rows with rows that come later, so they must come whole.

    Attributes:
        total: [batch, head].
    """

    def __init__(self) -> None:
        super().__init__()
        self._total: Tensor | None = None

    @property
    def total(self) -> Float[Tensor, "batch head"]:
        if self._total is None:
            raise ValueError("no rows have been seen yet: run the model, or call update, first.")
        return self._total

    def before(self, rows: Rows) -> Float[Tensor, "batch head"]:
        """The sum before these rows."""
        return rows.pattern.new_zeros(rows.pattern.shape[:2]) if self._total is None else self._total

    def _update(self, rows: Rows) -> None:
        fused = rows.fused_sums()
        if fused is not None:
            self._total = added(self._total, fused.reciprocal)
            return
        if rows.causal:
            self._total = added(self._total, rows.diagonal().square().sum(-1))
            return
        square = rows.by_position()
        self._total = added(self._total, (square * square.mT).sum((-2, -1)))

    def _merge(self, other: Statistic) -> None:
        assert isinstance(other, Reciprocity)
        self._total = added(self._total, other._total)
