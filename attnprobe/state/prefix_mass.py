"""Mass that stays inside a prefix, for patterns that look ahead."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic, padded_sum


class PrefixMass(Statistic):
    """W(t) = sum of A_ij over queries and keys among the first t tokens. O(n) memory a head, O(n) time a row.

    For a causal pattern W(t) = t and nothing is kept; bidirectional self-attention needs it to weigh time cuts.

    Attributes:
        inside: [batch, head, key], entry t - 1 is W(t).
    """

    def __init__(self) -> None:
        super().__init__()
        self._inside: Tensor | None = None

    @property
    def inside(self) -> Float[Tensor, "batch head key"]:
        if self._inside is None:
            raise ValueError("no rows have been seen yet: run the model, or call update, first.")
        return self._inside

    def _update(self, rows: Rows) -> None:
        if not rows.self_attention:
            raise ValueError("time cuts need queries and keys that are the same tokens, not cross-attention.")
        key = torch.arange(rows.pattern.shape[-1], device=rows.pattern.device)
        started = (key >= rows.position[..., None]) & rows.valid[..., None]
        self._inside = padded_sum(self._inside, (rows.pattern.cumsum(-1) * started[:, None]).sum(-2))

    def _merge(self, other: Statistic) -> None:
        assert isinstance(other, PrefixMass)
        if other._inside is not None:
            self._inside = padded_sum(self._inside, other._inside)
