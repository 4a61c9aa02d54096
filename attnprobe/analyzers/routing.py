"""Mean and routing: how much of a head's output is the same for every query."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.routing import RoutingSplit, split_from_moments
from attnprobe.rows import Rows
from attnprobe.state import Columns, Gram, OutputMoments, ValueNorms

_SOURCE = "Spectral Geometry of Attention (arXiv 2610.06012), mean-routing split"


class MeanRoutingSplit(Analyzer):
    """Orthogonal split A V = 1 m + A V_c under the intrinsic measure.

    Results (energies in squared units of the head output): `mean_energy`, `routed_energy`, `routed_fraction`,
    `value_energy`, `gain` = sqrt(routed / value energy) and its bound `gain_bound` = sqrt(lambda_2).

    Args:
        bound: compute sqrt(lambda_2), which needs the Gram matrix (shared with `IntrinsicTDO`; O(n^2) memory a
            head). Without it the analyzer keeps O(n + d^2) numbers.
        trace: keep every result except the bound at every step; stride: at every stride-th, held between.

    Needs the hooks `hook_z` and `hook_v`.

    >>> import torch
    >>> from attnprobe import MeanRoutingSplit, Rows
    >>> pattern, v = torch.eye(2).reshape(1, 1, 2, 2), torch.eye(2).reshape(1, 2, 1, 2)
    >>> split = MeanRoutingSplit()
    >>> split.update(Rows.from_pattern(pattern, z=v, v=v))
    >>> round(split.compute()["routed_fraction"].item(), 6)
    0.5

    Source: [SG] arXiv 2610.06012.
    """

    needs = ("pattern", "z", "v")
    variables: ClassVar = {
        "mean_energy": {"long_name": "||m||^2", "units": "output^2", "source": _SOURCE},
        "routed_energy": {"long_name": "||A V_c||^2", "units": "output^2", "source": _SOURCE},
        "routed_fraction": {"long_name": "routed / (mean + routed) energy", "units": "1", "source": _SOURCE},
        "value_energy": {"long_name": "||V_c||^2", "units": "output^2", "source": _SOURCE},
        "gain": {"long_name": "||A V_c|| / ||V_c||", "units": "1", "source": _SOURCE},
        "gain_bound": {"long_name": "sqrt(lambda_2)", "units": "1", "source": _SOURCE},
    }

    def __init__(self, *, bound: bool = True, trace: bool = False, stride: int = 1) -> None:
        super().__init__(trace=trace, stride=stride)
        self.bound = bound

    def update(self, rows: Rows) -> None:
        self.use(Columns).update(rows)
        self.use(OutputMoments).update(rows)
        self.use(ValueNorms).update(rows)
        if self.bound:
            self.use(Gram).update(rows)

    def compute(self) -> dict[str, Tensor]:
        columns, outputs = self.use(Columns), self.use(OutputMoments)
        mass = columns.mass[..., 1:] if columns.sunk else columns.mass
        values = (mass * self.use(ValueNorms).by_head(mass.shape[-1])).sum(-1)
        lambda2 = self.use(Gram).intrinsic_spectrum(columns)[1] if self.bound else torch.full_like(values, torch.nan)
        routed = outputs.covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        # mu sums to 1 exactly, also where the host's rows do so only to half precision
        total = columns.mass.sum(-1)
        mean = outputs.mean * (columns.count[:, None] / total).unsqueeze(-1)
        return self._named(split_from_moments(mean, routed, values / total, lambda2), bound=self.bound)

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        # the new values come with the rows: take them into a copy of the (small) norms first
        norms = ValueNorms()
        norms.merge(self.use(ValueNorms))
        norms.update(rows)
        mass, _ = self.use(Columns).before(rows)
        prefix_mass = mass.unsqueeze(-2) + rows.keys.cumsum(-2)
        total = prefix_mass.sum(-1).transpose(1, 2)
        if rows.sink is not None:
            prefix_mass = prefix_mass[..., 1:]
        count, mean, scatter = self.use(OutputMoments).prefixes(rows)
        count = count.clamp_min(1)[:, :, None]
        by_head = norms.by_head(prefix_mass.shape[-1]).unsqueeze(-2)
        values = (prefix_mass * by_head).sum(-1).transpose(1, 2) / total
        mean = mean * (count / total).unsqueeze(-1)
        routed = scatter.diagonal(dim1=-2, dim2=-1).sum(-1) / count
        split = self._named(split_from_moments(mean, routed, values, torch.full_like(values, torch.nan)), bound=False)
        return {name: value.transpose(1, 2) for name, value in split.items()}

    def _named(self, split: RoutingSplit, *, bound: bool) -> dict[str, Tensor]:
        fields = ("mean_energy", "routed_energy", "routed_fraction", "value_energy", "gain")
        named: dict[str, Tensor] = {name: getattr(split, name) for name in fields}
        if bound:
            named["gain_bound"] = split.bound
        return named
