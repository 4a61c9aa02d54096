"""Where attention looks relative to its query: at itself, one token back, how far back."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from attnprobe.analyzers.row_mean import (
    RowMean,
    RowValues,
    excluded_keys,
    rows_without,
    without_name,
    without_phrase,
)
from attnprobe.functional.lookback import look_back_of_rows
from attnprobe.rows import Rows


class _RowWeight(RowMean):
    """One weight of every row; the trace is that weight itself, not a mean over the prefix.

    Args:
        exclude_sink: leave out the first token (True), or keys at these positions: each row is divided by what is left
            of it, and rows that have nothing left, or whose weight would be on such a key, do not count.
        final: report the mean over all rows. Without it only traced rows are looked at, and where rows are computed
            from queries and keys, those of the prompt never are.
        trace: keep the weight of every row; stride: of every stride-th, held between.

    Raises:
        ValueError: neither final nor trace; positions that are none.
    """

    _result: tuple[str, str]  # its name and what it is

    def __init__(
        self,
        *,
        exclude_sink: bool | Sequence[int] = False,
        final: bool = True,
        trace: bool = False,
        stride: int = 1,
    ) -> None:
        super().__init__(trace=trace, stride=stride)
        if not (final or trace):
            raise ValueError("final=False leaves the trace alone to be reported: add trace=True.")
        self.exclude_sink = excluded_keys(exclude_sink)
        self.final = final

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results."""
        name, what = self._result
        without = self.exclude_sink
        return {name + without_name(without): {"long_name": what + without_phrase(without), "units": "1"}}

    @property
    def only_traces(self) -> bool:  # type: ignore[override] # a setting here
        """`compute` has nothing to say."""
        return not self.final

    def key(self, rows: Rows) -> Int[Tensor, "batch query"]:
        """The position of the key whose weight it is; negative where there is none."""
        raise NotImplementedError

    def measure(self, rows: Rows) -> dict[str, RowValues]:
        key = self.key(rows)
        rest, left = rows_without(rows, self.exclude_sink)
        there = (key >= 0) & rows.valid
        for excluded in self.exclude_sink:
            there &= key != excluded
        (name,) = self.variables
        return {name: RowValues(rest.attention_to(key), left & there.unsqueeze(1))}

    def update(self, rows: Rows) -> None:
        if self.final:
            super().update(rows)

    def compute(self) -> dict[str, Tensor]:
        return super().compute() if self.final else {}

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        """The weight of each row itself; 0 where there is no such key, NaN where it is left out."""
        if self.exclude_sink:
            return super().trace_rows(rows)
        return {name: value for name, (value, _) in self.measure(rows).items()}


class SelfAttention(_RowWeight):
    """Attention of a token to itself: mean over rows, `self_attention` in [0, 1]; its trace is the weight of each row.

    Args:
        exclude_sink: leave out the first token (True), or the keys at these positions: each row is divided by what is
            left of it, and their own rows do not count. The result is then `self_attention_without_sink` (of other
            positions, `..._without_keys_0_5`).
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

    _result = ("self_attention", "attention of a token to itself")

    def key(self, rows: Rows) -> Int[Tensor, "batch query"]:
        if not rows.self_attention:
            raise ValueError(
                "self-attention weights need queries and keys that are the same tokens; this site is cross-attention."
            )
        return rows.position


class PreviousTokenAttention(_RowWeight):
    """Attention of a token to the one before it: mean over rows, `previous_token_attention` in [0, 1].

    The first token has none before it and does not count. The trace is the weight of each row.

    Args:
        exclude_sink: leave out the first token (True), or the keys at these positions: each row is divided by what is
            left of it, and rows right after such a key do not count. The result is then
            `previous_token_attention_without_sink` (of other positions, `..._without_keys_0_5`).
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

    _result = ("previous_token_attention", "attention of a token to the one before")

    def key(self, rows: Rows) -> Int[Tensor, "batch query"]:
        if not rows.self_attention:
            raise ValueError("the previous token is one of the same sequence: this site is cross-attention.")
        return rows.position - 1


class MeanLookBack(RowMean):
    """How many tokens attention looks back: mean over rows of sum_j A_ij (i - j), `mean_look_back`.

    Between 0 and (n - 1)/2 tokens under a causal mask (the first row looks at itself); in bidirectional attention keys
    ahead count negative. The trace is the distance of each row.

    Args:
        exclude_sink: leave out the first token (True), or the keys at these positions: each row is divided by what is
            left of it, and rows that have nothing left do not count; NaN where none has. The result is then
            `mean_look_back_without_sink` (of other positions, `..._without_keys_0_5`).
        trace: keep the distance of every row; stride: of every stride-th, held between.

    Raises:
        ValueError: cross-attention, positions that are none, or rows under the policy "sink" without `exclude_sink`.

    >>> import torch
    >>> from attnprobe import MeanLookBack, Rows
    >>> analyzer = MeanLookBack()
    >>> analyzer.update(Rows.from_pattern(torch.tensor([[1.0, 0.0], [0.5, 0.5]]).reshape(1, 1, 2, 2)))
    >>> analyzer.compute()["mean_look_back"].item()
    0.25

    Source: attention distance of a head, arXiv 1906.04284 (Vig and Belinkov).
    """

    def __init__(self, *, exclude_sink: bool | Sequence[int] = False, trace: bool = False, stride: int = 1) -> None:
        super().__init__(trace=trace, stride=stride)
        self.exclude_sink = excluded_keys(exclude_sink)

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results."""
        without = self.exclude_sink
        long_name = "mean distance that attention looks back" + without_phrase(without)
        return {"mean_look_back" + without_name(without): {"long_name": long_name, "units": "tokens"}}

    def measure(self, rows: Rows) -> dict[str, RowValues]:
        if not rows.self_attention:
            raise ValueError("a distance is between tokens of one sequence: this site is cross-attention.")
        if rows.sink is not None and not self.exclude_sink:
            raise ValueError("a sink key has no place in the text: use rows='renormalize', or exclude_sink=True.")
        rest, counted = rows_without(rows, self.exclude_sink)
        (name,) = self.variables
        return {name: RowValues(look_back_of_rows(rest.pattern, rows.position.unsqueeze(1)), counted)}
