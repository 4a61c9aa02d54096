"""Direction: how far a head is from symmetric, and how much of that is a gradient."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.direction import hodge_from_columns
from attnprobe.rows import Rows
from attnprobe.state import Columns, OffDiagonal, Reciprocity

_SOURCE = "Self-Attention as Transport (arXiv 2605.04893), asymmetry and Hodge split"


class Asymmetry(Analyzer):
    """G = ||(A - A^T)/2||_F / ||A||_F and its Hodge split G^2 = gradient^2 + curl^2. O(n) memory a head.

    The curl is what the gradient leaves of the asymmetry: in float32 it is known to about 1e-3 of it, and a curl of 0
    shows as that much.

    Results in [0, 1]: `asymmetry`, `asymmetry_gradient`, `asymmetry_curl`. Under a causal mask the asymmetry is at most
    1/sqrt(2) and largely set by the mask.

    Args:
        trace: keep the results at every step; stride: at every stride-th, held between.

    Raises:
        ValueError: cross-attention (the pattern must be square), or rows under the policy "sink".

    >>> import torch
    >>> from attnprobe import Asymmetry, Rows
    >>> asymmetry = Asymmetry()
    >>> asymmetry.update(Rows.from_pattern(torch.eye(3).reshape(1, 1, 3, 3)))
    >>> asymmetry.compute()["asymmetry"].item()
    0.0

    Source: [ST] arXiv 2605.04893.
    """

    variables: ClassVar = {
        "asymmetry": {"long_name": "||(A - A^T)/2||_F / ||A||_F", "units": "1", "source": _SOURCE},
        "asymmetry_gradient": {
            "long_name": "gradient part of the asymmetry",
            "units": "1",
            "source": _SOURCE,
        },
        "asymmetry_curl": {"long_name": "curl part of the asymmetry", "units": "1", "source": _SOURCE},
    }

    def update(self, rows: Rows) -> None:
        _refuse(rows, "asymmetry pairs A_ij with A_ji")
        self.use(Columns).update(rows)
        self.use(Reciprocity).update(rows)
        if rows.causal:
            self.use(OffDiagonal).update(rows)

    def compute(self) -> dict[str, Tensor]:
        columns, reciprocal = self.use(Columns), self.use(Reciprocity).total.double()
        if (OffDiagonal, "prefix") in self._statistics:
            energy = self.use(OffDiagonal).energy + reciprocal
        else:
            energy = columns.energy.double().sum(-1)
        return _named(columns.mass, energy, reciprocal, columns.count[:, None])

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        _refuse(rows, "asymmetry pairs A_ij with A_ji")
        if not rows.causal:
            return super().trace_rows(rows)
        mass, _ = self.use(Columns).before(rows)
        others = self.use(OffDiagonal)
        squares = others.before(rows).unsqueeze(-1) + others.by_row(rows).cumsum(-1)
        diagonal = self.use(Reciprocity).before(rows).unsqueeze(-1) + rows.diagonal().square().cumsum(-1)
        prefix_mass = mass.unsqueeze(-2) + rows.pattern.cumsum(-2)
        return _named(
            prefix_mass, squares + diagonal.double(), diagonal.double(), (rows.position + 1)[:, None].clamp_min(1)
        )


def _named(mass: Tensor, frobenius: Tensor, reciprocal: Tensor, length: Tensor) -> dict[str, Tensor]:
    split = hodge_from_columns(mass, frobenius, reciprocal, length.expand(mass.shape[:-1]))
    return {
        "asymmetry": split.asymmetry,
        "asymmetry_gradient": split.gradient,
        "asymmetry_curl": split.curl,
    }


def _refuse(rows: Rows, why: str) -> None:
    if not rows.self_attention:
        raise ValueError(f"{why}, so it needs a square pattern: this site is cross-attention.")
    if rows.sink is not None:
        raise ValueError(f"{why}; a sink key has no query to pair with: use rows='renormalize'.")
