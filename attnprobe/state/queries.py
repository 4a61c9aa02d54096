"""Queries and keys themselves: what a pattern can be computed from again."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from attnprobe.functional.factored import Factors, joined
from attnprobe.functional.lanczos import eigenvalue_beside_operator
from attnprobe.functional.tdo import intrinsic_pair
from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic


class Queries(Statistic):
    """The queries of every row so far, and the keys. O(n d) memory a head; keys are those of the host's cache.

    Attributes:
        factors: all rows so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[Factors] = []

    @property
    def factors(self) -> Factors:
        """All rows so far.

        Raises:
            ValueError: no rows have come.
        """
        if not self._parts:
            raise ValueError("no rows have been seen yet: run the model, or call update, before reading results.")
        return joined(self._parts)

    def second_eigenvalue(self, mass: Float[Tensor, "batch head key"]) -> Float[Tensor, "batch head"]:
        """lambda_2 of the intrinsic TDO from column masses and rows computed again."""
        factors = self.factors
        scale, known = intrinsic_pair(mass)

        def product(x: Tensor) -> Tensor:
            return factors.normal_product(x * scale.unsqueeze(-2)) * scale.unsqueeze(-2)

        return eigenvalue_beside_operator(product, known)

    def _update(self, rows: Rows) -> None:
        if rows.factors is None:
            raise ValueError(
                "lambda_2 of a sketch is computed from queries and keys, which this host does not show: use a plain "
                "transformers model, method='exact', or lambda2=False."
            )
        if self._parts:  # older keys are a part of the newer ones
            self._parts[-1] = self._parts[-1].without_keys()
        self._parts.append(rows.factors)

    def _merge(self, other: Statistic) -> None:
        raise ValueError("queries are kept in the order of their rows, so those of other rows cannot be merged in.")
