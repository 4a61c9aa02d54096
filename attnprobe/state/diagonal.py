"""The diagonal of the pattern: what every token gives to itself."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic, padded_sum


class Diagonal(Statistic):
    """A_ii by position. O(n) memory a head, O(n) time a row.

    Attributes:
        weights: [batch, head, key], 0 where no row has come.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: Tensor | None = None

    @property
    def weights(self) -> Float[Tensor, "batch head key"]:
        if self._weights is None:
            raise ValueError("no rows have been seen yet: run the model, or call update, before reading results.")
        return self._weights

    def through(self, rows: Rows) -> Float[Tensor, "batch head key"]:
        """The weights of the rows so far and of these, on the keys these rows have."""
        own = _by_position(rows)
        return own if self._weights is None else padded_sum(own, self._weights)

    def _update(self, rows: Rows) -> None:
        self._weights = padded_sum(self._weights, _by_position(rows))

    def _merge(self, other: Statistic) -> None:
        assert isinstance(other, Diagonal)
        if other._weights is not None:
            self._weights = padded_sum(self._weights, other._weights)


def _by_position(rows: Rows) -> Float[Tensor, "batch head key"]:
    diagonal = rows.diagonal()  # 0 in padded rows, which may then stand for position 0
    position = rows.position.clamp_min(0)[:, None].expand_as(diagonal)
    return torch.zeros_like(rows.pattern[:, :, 0]).scatter_add_(-1, position, diagonal)
