"""The Gram matrix of the keys, G = A^T A."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from attnprobe.functional.gram import BlockGram
from attnprobe.functional.lanczos import SMALL, eigenvalue_beside, eigenvalue_beside_of
from attnprobe.functional.tdo import intrinsic_pair
from attnprobe.rows import Rows
from attnprobe.state.columns import Columns
from attnprobe.state.statistic import Statistic


class Gram(Statistic):
    """G_jk = sum_i A_ij A_ik, half stored. O(n^2) memory a head, O(n^2) time a row: the only such statistic.

    Attributes:
        matrix: the `BlockGram` [batch, head, key, key]; with a sink, the sink is key 0 (`Rows.keys`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.matrix = BlockGram()
        self._spectrum: tuple[Tensor, Tensor] | None = None

    def intrinsic_spectrum(self, columns: Columns) -> tuple[Float[Tensor, "batch head"], Float[Tensor, "batch head"]]:
        """||S||_F^2 and lambda_2 of the intrinsic TDO, computed once however many analyzers ask.

        The first eigenpair of S is known (1, with eigenvector sqrt(c)), so it is left out of the iteration.
        """
        if self._spectrum is None:
            scale, known = intrinsic_pair(columns.mass)
            square = self.matrix.weighted_square(scale.square().unsqueeze(-2)).squeeze(-1)
            self._spectrum = square, self._second_eigenvalue(scale, known)
        return self._spectrum

    def _second_eigenvalue(
        self, scale: Float[Tensor, "batch head key"], known: Float[Tensor, "batch head key"]
    ) -> Float[Tensor, "batch head"]:
        n = self.matrix.size
        if scale.device.type == "cpu" and n > SMALL:  # without a second, full copy of the matrix
            values = eigenvalue_beside_of(self.matrix.operators(scale), known.reshape(-1, n))
            return values.reshape(scale.shape[:-1])
        return eigenvalue_beside(self.matrix.dense(scale), known)

    def _update(self, rows: Rows) -> None:
        self._spectrum = None
        start = None
        if rows.causal:
            start = rows.first + (rows.sink is not None)
        self.matrix.add_(rows.keys, causal_start=start)

    def _merge(self, other: Statistic) -> None:
        assert isinstance(other, Gram)
        self._spectrum = None
        self.matrix.merge_(other.matrix)
