"""Heads that act where a token of the text comes again."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from attnprobe.analyzers.row_mean import RowMean, RowValues
from attnprobe.functional.repeats import earlier_occurrences, followers
from attnprobe.rows import Rows


class _RepeatScore(RowMean):
    """Attention to some keys for every row whose token came before."""

    needs = ("pattern", "tokens")

    def looked_at(self, earlier: Bool[Tensor, "batch query key"]) -> Bool[Tensor, "batch query key"]:
        """The keys that count, of the earlier occurrences of each query's token."""
        raise NotImplementedError

    def measure(self, rows: Rows) -> dict[str, RowValues]:
        if not rows.self_attention:
            raise ValueError("a token comes again in its own sequence: this site is cross-attention.")
        if rows.tokens is None:
            raise ValueError(f"{type(self).__name__} needs token ids, and the host shows none here.")
        earlier = earlier_occurrences(rows.tokens, rows.position)
        keys = self.looked_at(earlier).unsqueeze(1).to(rows.pattern.dtype)
        (name,) = self.variables
        return {name: RowValues(torch.linalg.vecdot(rows.pattern, keys), earlier.any(-1).unsqueeze(1))}


class DuplicateTokenScore(_RepeatScore):
    """Attention to earlier occurrences of the token at hand, `duplicate_token_score` in [0, 1].

    Mean of sum_{j < i, x_j = x_i} A_ij over the rows i whose token came before; NaN where no token comes twice. The
    trace is the weight of each row, NaN where its token is new. Under the policy "sink" weights count as they are.

    Args:
        trace: keep the weight of every row; stride: of every stride-th, held between.

    Needs token ids.

    Raises:
        ValueError: cross-attention, or a host that was given embeddings in place of tokens.

    >>> import torch
    >>> from attnprobe import DuplicateTokenScore, Rows
    >>> analyzer = DuplicateTokenScore()
    >>> pattern = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.75, 0.25, 0.0]]).reshape(1, 1, 3, 3)
    >>> analyzer.update(Rows.from_pattern(pattern, tokens=torch.tensor([[7, 8, 7]])))
    >>> analyzer.compute()["duplicate_token_score"].item()
    0.75

    Source: duplicate token heads, arXiv 2211.00593 (Wang et al.).
    """

    variables: ClassVar = {
        "duplicate_token_score": {"long_name": "attention to earlier occurrences of the same token", "units": "1"}
    }

    def looked_at(self, earlier: Bool[Tensor, "batch query key"]) -> Bool[Tensor, "batch query key"]:
        return earlier


class InductionScore(_RepeatScore):
    """Attention to what followed earlier occurrences of the token at hand, `induction_score` in [0, 1].

    Mean of sum_{j < i, x_j = x_i} A_{i, j+1} over the rows i whose token came before; NaN where no token comes twice.
    What followed the occurrence right before the query is the query itself, and counts. The trace is the weight of
    each row, NaN where its token is new. Under the policy "sink" weights count as they are.

    Args:
        trace: keep the weight of every row; stride: of every stride-th, held between.

    Needs token ids.

    Raises:
        ValueError: cross-attention, or a host that was given embeddings in place of tokens.

    >>> import torch
    >>> from attnprobe import InductionScore, Rows
    >>> analyzer = InductionScore()
    >>> pattern = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.75, 0.25, 0.0]]).reshape(1, 1, 3, 3)
    >>> analyzer.update(Rows.from_pattern(pattern, tokens=torch.tensor([[7, 8, 7]])))
    >>> analyzer.compute()["induction_score"].item()
    0.25

    Source: prefix matching of induction heads, arXiv 2209.11895 (Olsson et al.).
    """

    variables: ClassVar = {
        "induction_score": {"long_name": "attention to what followed earlier occurrences of the token", "units": "1"}
    }

    def looked_at(self, earlier: Bool[Tensor, "batch query key"]) -> Bool[Tensor, "batch query key"]:
        return followers(earlier)
