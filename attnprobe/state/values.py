"""Squared norms of the value vectors."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic, padded_sum


class ValueNorms(Statistic):
    """||v_j||^2 by position and key/value head. O(n) memory; heads that share keys share it (grouped queries).

    Attributes:
        squared: [batch, kv_head, key].
    """

    def __init__(self) -> None:
        super().__init__()
        self._squared: Tensor | None = None
        self._kv_head: Tensor | None = None
        self._n_heads = 0

    def by_head(self, n_keys: int) -> Float[Tensor, "batch head key"]:
        """The norms as each watched query head sees them, on the first n_keys keys."""
        if self._squared is None:
            raise ValueError("no values have been seen yet: run the model, or call update, first.")
        squared = padded_sum(
            self._squared.new_zeros((*self._squared.shape[:2], max(n_keys, self._squared.shape[-1]))),
            self._squared,
        )[..., :n_keys]
        if self._kv_head is not None:
            return squared[:, self._kv_head]
        return squared.repeat_interleave(self._n_heads // squared.shape[1], dim=1)

    def _update(self, rows: Rows) -> None:
        if rows.v is None or rows.key_position is None:
            if rows.self_attention:
                raise ValueError("values are needed and these rows carry none: pass v (the hook `hook_v`).")
            return
        self._kv_head, self._n_heads = rows.kv_head, rows.n_head
        real = rows.key_position >= 0
        norms = torch.where(real[:, :, None], rows.v.square().sum(-1), 0.0).transpose(1, 2)
        placed = norms.new_zeros((*norms.shape[:2], rows.n_key))
        index = rows.key_position.clamp_min(0)[:, None].expand_as(norms)
        self._squared = padded_sum(self._squared, placed.scatter_add_(-1, index, norms))

    def _merge(self, other: Statistic) -> None:
        assert isinstance(other, ValueNorms)
        if other._squared is not None:
            self._squared = padded_sum(self._squared, other._squared)
            self._kv_head, self._n_heads = other._kv_head, other._n_heads
