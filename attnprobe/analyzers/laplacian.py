"""The attention Laplacian: how much more tokens receive than they keep."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.laplacian import check_clip, mean_from_columns
from attnprobe.rows import Rows
from attnprobe.state import Columns, Diagonal

_SOURCE = "LapEigvals (arXiv 2502.17598), eigenvalues of the attention Laplacian"


class LaplacianEigenvalues(Analyzer):
    """Mean over tokens of the Laplacian eigenvalues L_ii = (sum_{u >= i} A_ui) / (n - i) - A_ii, clipped to [0, 1].

    Result: `laplacian_eigenvalue_mean` in [0, 1] (`..._clipped_once` with `clip="mean"`). O(n) memory a head, O(n) time
    a row. In float32 it is within 1e-6 of the value in float64, over 1500 tokens.

    Args:
        clip: "each" (default): every eigenvalue is clipped; "mean": their mean is.
        trace: keep the value of the prefix at every step; stride: at every stride-th, held between.

    Raises:
        ValueError: an unknown clip, a site that is not causal self-attention, or rows under the policy "sink".

    >>> import torch
    >>> from attnprobe import LaplacianEigenvalues, Rows
    >>> analyzer = LaplacianEigenvalues()
    >>> analyzer.update(Rows.from_pattern(torch.eye(3).reshape(1, 1, 3, 3)))
    >>> analyzer.compute()["laplacian_eigenvalue_mean"].item()
    0.0

    Source: [LE] arXiv 2502.17598; [SG] arXiv 2610.06012, LapEigValRAUQ. The clipping is our reading.
    """

    variables: ClassVar = {
        name: {
            "long_name": f"mean of the Laplacian eigenvalues, {what} clipped to [0, 1]",
            "units": "1",
            "source": _SOURCE,
        }
        for name, what in (
            ("laplacian_eigenvalue_mean", "each"),
            ("laplacian_eigenvalue_mean_clipped_once", "their mean"),
        )
    }

    def __init__(self, clip: str = "each", *, trace: bool = False, stride: int = 1) -> None:
        super().__init__(trace=trace, stride=stride)
        check_clip(clip)
        self.clip = clip

    @property
    def result_name(self) -> str:
        """What the result is called."""
        return "laplacian_eigenvalue_mean" + ("" if self.clip == "each" else "_clipped_once")

    def update(self, rows: Rows) -> None:
        _refuse(rows)
        self.use(Diagonal).update(rows)
        self.use(Columns).update(rows)

    def compute(self) -> dict[str, Tensor]:
        columns = self.use(Columns)
        return {
            self.result_name: mean_from_columns(
                columns.mass, self.use(Diagonal).weights, columns.count[:, None], self.clip
            )
        }

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        _refuse(rows)
        mass, _ = self.use(Columns).before(rows)
        prefix_mass = mass.unsqueeze(-2) + rows.pattern.cumsum(-2)
        own = self.use(Diagonal).through(rows).unsqueeze(-2)  # later tokens are none of the prefix, and not looked at
        value = mean_from_columns(prefix_mass, own, (rows.position + 1).unsqueeze(1), self.clip)
        return {self.result_name: torch.where(rows.valid.unsqueeze(1), value, torch.nan)}


def _refuse(rows: Rows) -> None:
    if not (rows.causal and rows.self_attention):
        raise ValueError("the eigenvalues of the Laplacian stand on its diagonal in causal self-attention only.")
    if rows.sink is not None:
        raise ValueError("a sink key is no token and has no Laplacian eigenvalue: use rows='renormalize'.")
