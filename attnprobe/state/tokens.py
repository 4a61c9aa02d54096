"""Token ids, for measures that weigh keys by token."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic


class Tokens(Statistic):
    """The token ids so far.

    Attributes:
        ids: [batch, key] by position, -1 where there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ids: Tensor | None = None

    @property
    def ids(self) -> Int[Tensor, "batch key"]:
        if self._ids is None:
            raise ValueError("no rows have been seen yet: run the model, or call update, first.")
        return self._ids

    def _update(self, rows: Rows) -> None:
        if rows.tokens is None:
            raise ValueError("the measures 'zipf' and 'unembedding' need token ids, and the host shows none here.")
        self._ids = rows.tokens

    def _merge(self, other: Statistic) -> None:
        assert isinstance(other, Tokens)
        if self._ids is None or (other._ids is not None and other._ids.shape[1] > self._ids.shape[1]):
            self._ids = other._ids
