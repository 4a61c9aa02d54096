"""Transport: how well mass flows across time."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.transport import capacity_from_columns, landscape_from_columns
from attnprobe.rows import Rows
from attnprobe.state import Columns, PrefixMass

_SOURCE = "Self-Attention as Transport (arXiv 2605.04893), prefix capacity"


class TransportCapacity(Analyzer):
    """Conductance of the worst time cut {queries <= t} u {keys <= t}. O(n) memory a head.

    Results: `phi` in [0, 1], the smallest conductance, and `cut` = t*/n, where it is; with `landscape=True`
    also `landscape` [batch, head, position]: the conductance at every t = 1..n-1. A single token has no cut: NaN.

    Args:
        landscape: report the whole landscape of the final pattern.
        trace: keep phi and cut at every step; stride: at every stride-th, held between.

    Raises:
        ValueError: cross-attention (time cuts need a square pattern), or rows under the policy "sink".

    >>> import torch
    >>> from attnprobe import Rows, TransportCapacity
    >>> capacity = TransportCapacity()
    >>> uniform = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
    >>> capacity.update(Rows.from_pattern(uniform.reshape(1, 1, 4, 4)))
    >>> round(capacity.compute()["phi"].item(), 4)
    0.3514

    Source: [ST] arXiv 2605.04893.
    """

    variables: ClassVar = {
        "phi": {"long_name": "smallest conductance of a time cut", "units": "1", "source": _SOURCE},
        "cut": {"long_name": "position t*/n of that cut", "units": "1", "source": _SOURCE},
        "landscape": {"long_name": "conductance of every time cut", "units": "1", "source": _SOURCE},
    }

    def __init__(self, *, landscape: bool = False, trace: bool = False, stride: int = 1) -> None:
        super().__init__(trace=trace, stride=stride)
        self.landscape = landscape

    def update(self, rows: Rows) -> None:
        _refuse(rows)
        self.use(Columns).update(rows)
        if not rows.causal:
            self.use(PrefixMass).update(rows)

    def compute(self) -> dict[str, Tensor]:
        columns = self.use(Columns)
        mass = columns.mass
        within = self.use(PrefixMass).inside if (PrefixMass, "prefix") in self._statistics else None
        length = columns.count[:, None].expand(mass.shape[:-1])
        capacity = capacity_from_columns(mass, length, within)
        result = {"phi": capacity.phi, "cut": capacity.cut}
        if self.landscape:
            result["landscape"] = landscape_from_columns(mass, length, within)
        return result

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        _refuse(rows)
        if not rows.causal:
            return super().trace_rows(rows)
        mass, _ = self.use(Columns).before(rows)
        prefix_mass = mass.unsqueeze(-2) + rows.pattern.cumsum(-2)
        length = (rows.position + 1).clamp_min(1)[:, None].expand(prefix_mass.shape[:-1])
        capacity = capacity_from_columns(prefix_mass, length)
        return {"phi": capacity.phi, "cut": capacity.cut}


def _refuse(rows: Rows) -> None:
    if not rows.self_attention:
        raise ValueError("time cuts need queries and keys that are the same tokens: this site is cross-attention.")
    if rows.sink is not None:
        raise ValueError("time cuts have no place for a sink key: use rows='renormalize'.")
