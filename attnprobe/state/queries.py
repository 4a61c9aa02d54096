"""Queries and keys themselves: what a pattern can be computed from again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnprobe.functional.factored import Factors
from attnprobe.functional.lanczos import eigenvalue_beside_operator
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
        last = self._parts[-1]
        return replace(
            last,
            q=torch.cat([part.q for part in self._parts], 2),
            position=torch.cat([part.position for part in self._parts], 1),
            first=self._parts[0].first,
            padded=any(part.padded for part in self._parts),
        )

    def second_eigenvalue(self, mass: Tensor) -> Tensor:
        """lambda_2 of the intrinsic TDO [batch, head] from column masses [batch, head, key] and rows computed again."""
        factors = self.factors
        tiny = torch.finfo(mass.dtype).tiny
        inside = mass >= tiny
        scale = torch.where(inside, mass.clamp_min(tiny).rsqrt(), 0.0)
        known = torch.where(inside, mass, 0.0).sqrt()
        known = known / known.norm(dim=-1, keepdim=True).clamp_min(tiny)

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
