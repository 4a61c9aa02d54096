"""What a token gives to itself and to the token before it."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.rows import Rows


class _RowWeight(Analyzer):
    """One weight of every row; the trace is that weight itself, not a mean over the prefix.

    Args:
        final: report the mean over all rows. Without it only traced rows are looked at, and where rows are computed
            from queries and keys, those of the prompt never are.
        trace: keep the weight of every row; stride: of every stride-th, held between.

    Raises:
        ValueError: neither final nor trace.
    """

    def __init__(self, *, final: bool = True, trace: bool = False, stride: int = 1) -> None:
        super().__init__(trace=trace, stride=stride)
        if not (final or trace):
            raise ValueError("final=False leaves the trace alone to be reported: add trace=True.")
        self.final = final

    @property
    def only_traces(self) -> bool:  # type: ignore[override] # a setting here
        """`compute` has nothing to say."""
        return not self.final

    def weights(self, rows: Rows) -> Float[Tensor, "batch head query"]:
        """The weight of each row, 0 where there is none."""
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return next(iter(self.variables))

    def update(self, rows: Rows) -> None:
        if self.final:
            self.accumulate(mass=self.weights(rows).sum(-1), rows=self._counted(rows)[:, None])

    def compute(self) -> dict[str, Tensor]:
        if not self.final:
            return {}
        rows = self.total["rows"]
        return {self._name: torch.where(rows > 0, self.total["mass"] / rows, torch.nan)}

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        """The weight of each row itself, not a mean over the prefix."""
        return {self._name: self.weights(rows)}

    def _counted(self, rows: Rows) -> Tensor:
        """[batch] how many rows have such a weight."""
        return rows.count


class SelfAttention(_RowWeight):
    """Attention of a token to itself: mean over rows, `self_attention` in [0, 1]; its trace is the weight of each row.

    Args:
        final: report the mean (default). With `final=False` only traced rows are looked at.
        trace: keep the weight of every row; stride: of every stride-th, held between.

    >>> import torch
    >>> from attnprobe import Rows, SelfAttention
    >>> analyzer = SelfAttention()
    >>> analyzer.update(Rows.from_pattern(torch.eye(3).reshape(1, 1, 3, 3)))
    >>> analyzer.compute()["self_attention"].item()
    1.0

    Source: RAUQ arXiv 2505.20045 as its benchmark code reads it (SPEC: indexing "lm-polygraph").
    """

    variables: ClassVar = {"self_attention": {"long_name": "attention of a token to itself", "units": "1"}}

    def weights(self, rows: Rows) -> Float[Tensor, "batch head query"]:
        return rows.diagonal()


class PreviousTokenAttention(_RowWeight):
    """Attention of a token to the one before it: mean over rows, `previous_token_attention` in [0, 1].

    The first token has none before it and does not count. The trace is the weight of each row.

    Args:
        final: report the mean (default). With `final=False` only traced rows are looked at.
        trace: keep the weight of every row; stride: of every stride-th, held between.

    >>> import torch
    >>> from attnprobe import PreviousTokenAttention, Rows
    >>> analyzer = PreviousTokenAttention()
    >>> shift = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> analyzer.update(Rows.from_pattern(shift.reshape(1, 1, 2, 2)))
    >>> analyzer.compute()["previous_token_attention"].item()
    1.0

    Source: RAUQ arXiv 2505.20045.
    """

    variables: ClassVar = {
        "previous_token_attention": {"long_name": "attention of a token to the one before", "units": "1"}
    }

    def weights(self, rows: Rows) -> Float[Tensor, "batch head query"]:
        if not rows.self_attention:
            raise ValueError("the previous token is one of the same sequence: this site is cross-attention.")
        return rows.attention_to(rows.position - 1)

    def _counted(self, rows: Rows) -> Tensor:
        return (rows.position >= 1).sum(-1)
