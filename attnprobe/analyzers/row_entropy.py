"""Entropy of attention rows."""

from __future__ import annotations

from collections.abc import Sequence

from attnprobe.analyzers.row_mean import (
    RowMean,
    RowValues,
    excluded_keys,
    rows_without,
    without_name,
    without_phrase,
)
from attnprobe.functional.row_entropy import entropy_of_rows
from attnprobe.rows import Rows


class RowEntropy(RowMean):
    """Entropy of the rows: mean over rows of -sum_j A_ij log A_ij, `row_entropy`, nats.

    Under the policy "sink" the sink is a key like the others (and left out with them). The trace is the entropy of
    each row.

    Args:
        exclude_sink: leave out the first token (True), or the keys at these positions: each row is divided by what is
            left of it, and rows that have nothing left do not count; NaN where none has. The result is then
            `row_entropy_without_sink` (of other positions, `..._without_keys_0_5`).
        trace: keep the entropy of every row; stride: of every stride-th, held between.

    Raises:
        ValueError: no positions, a negative one, or one twice.
        TypeError: positions that are no whole numbers.

    >>> import torch
    >>> from attnprobe import RowEntropy, Rows
    >>> analyzer = RowEntropy()
    >>> analyzer.update(Rows.from_pattern(torch.tensor([[1.0, 0.0], [0.5, 0.5]]).reshape(1, 1, 2, 2)))
    >>> round(analyzer.compute()["row_entropy"].item(), 4)
    0.3466

    Source: [SG] arXiv 2610.06012.
    """

    def __init__(self, *, exclude_sink: bool | Sequence[int] = False, trace: bool = False, stride: int = 1) -> None:
        super().__init__(trace=trace, stride=stride)
        self.exclude_sink = excluded_keys(exclude_sink)

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results."""
        without = self.exclude_sink
        long_name = "mean entropy of attention rows" + without_phrase(without)
        return {"row_entropy" + without_name(without): {"long_name": long_name, "units": "nats"}}

    def measure(self, rows: Rows) -> dict[str, RowValues]:
        rest, counted = rows_without(rows, self.exclude_sink)
        (name,) = self.variables
        return {name: RowValues(entropy_of_rows(rest.keys), counted)}
