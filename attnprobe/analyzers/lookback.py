"""What a token gives to itself and to the token before it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.rows import Rows


class SelfAttention(Analyzer):
    """Attention of a token to itself: mean over rows, `self_attention` in [0, 1]; its trace is the weight of each row.

    >>> import torch
    >>> from attnprobe import Rows, SelfAttention
    >>> analyzer = SelfAttention()
    >>> analyzer.update(Rows.from_pattern(torch.eye(3).reshape(1, 1, 3, 3)))
    >>> analyzer.compute()["self_attention"].item()
    1.0

    Source: RAUQ arXiv 2505.20045 as its benchmark code reads it (SPEC: indexing "lm-polygraph").
    """

    variables: ClassVar = {"self_attention": {"long_name": "attention of a token to itself", "units": "1"}}

    def update(self, rows: Rows) -> None:
        self.accumulate(mass=rows.diagonal().sum(-1), rows=rows.count[:, None])

    def compute(self) -> dict[str, Tensor]:
        return {"self_attention": self.total["mass"] / self.total["rows"]}

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        """The weight of each row itself, not a mean over the prefix."""
        return {"self_attention": rows.diagonal()}


class PreviousTokenAttention(Analyzer):
    """Attention of a token to the one before it: mean over rows, `previous_token_attention` in [0, 1].

    The first token has none before it and does not count. The trace is the weight of each row.

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

    def update(self, rows: Rows) -> None:
        with_previous = (rows.position >= 1).sum(-1)
        self.accumulate(mass=self._weights(rows).sum(-1), rows=with_previous[:, None])

    def compute(self) -> dict[str, Tensor]:
        rows = self.total["rows"]
        return {"previous_token_attention": torch.where(rows > 0, self.total["mass"] / rows, torch.nan)}

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        """The weight of each row itself, not a mean over the prefix."""
        return {"previous_token_attention": self._weights(rows)}

    def _weights(self, rows: Rows) -> Tensor:
        if not rows.self_attention:
            raise ValueError("the previous token is one of the same sequence: this site is cross-attention.")
        return rows.attention_to(rows.position - 1)
