"""Analyzers whose value is a mean over rows of something that each row has by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.sinks import FIRST_TOKEN, check_keys, without_keys
from attnprobe.rows import Rows


class RowValues(NamedTuple):
    """What each row has, and which rows count.

    Attributes:
        value: [batch, head, query], anything in rows that do not count.
        counted: [batch, head or 1, query].
    """

    value: Float[Tensor, "batch head query"]
    counted: Bool[Tensor, "batch head_or_1 query"]


class RowMean(Analyzer):
    """Base class of means over rows: a subclass writes `measure`, and describes its results in `variables`.

    O(1) memory a head.

    A head and sequence without any row that counts has the mean NaN. The trace is the value of each row itself, not a
    mean over the prefix, and NaN where the row does not count.

    >>> import torch
    >>> from attnprobe import Rows
    >>> class LargestWeight(RowMean):
    ...     variables = {"largest_weight": {"long_name": "largest weight of a row", "units": "1"}}
    ...     def measure(self, rows):
    ...         return {"largest_weight": RowValues(rows.pattern.amax(-1), rows.valid[:, None])}
    >>> analyzer = LargestWeight()
    >>> analyzer.update(Rows.from_pattern(torch.tensor([[1.0, 0.0], [0.5, 0.5]]).reshape(1, 1, 2, 2)))
    >>> analyzer.compute()["largest_weight"].item()
    0.75
    """

    def measure(self, rows: Rows) -> dict[str, RowValues]:
        """What the rows have, by name of the result."""
        raise NotImplementedError(f"{type(self).__name__} must define measure(self, rows).")

    def update(self, rows: Rows) -> None:
        for name, (value, counted) in self.measure(rows).items():
            self._add(name, value.where(counted, 0.0).sum(-1), counted.sum(-1))

    def compute(self) -> dict[str, Tensor]:
        return {name: self.total[name] / self.total[f"{name}, rows"] for name in self.variables}

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        """The value of each row itself."""
        return traced(self.measure(rows))

    def merge(self, other: Analyzer) -> None:
        """Add what another analyzer with the same settings saw: other rows of the same sequences.

        Raises:
            TypeError: the other is of another class.
            ValueError: its settings differ.
        """
        if type(other) is type(self) and set(other.variables) != set(self.variables):
            raise ValueError(f"cannot merge {other!r} into {self!r}: their settings differ.")
        super().merge(other)

    def _add(self, name: str, total: Float[Tensor, "batch head"], count: Tensor) -> None:
        self.accumulate(**{name: total, f"{name}, rows": count})


def traced(values: Mapping[str, RowValues]) -> dict[str, Float[Tensor, "batch head query"]]:
    """The value of each row, NaN where it does not count."""
    return {name: value.where(counted, torch.nan) for name, (value, counted) in values.items()}


def excluded_keys(exclude_sink: bool | Sequence[int]) -> tuple[int, ...]:
    """The key positions that `exclude_sink` names: none, the first token, or those given.

    Raises:
        ValueError: no positions, a negative one, or one twice.
        TypeError: not whole numbers.

    >>> excluded_keys(False), excluded_keys(True), excluded_keys([5, 0])
    ((), (0,), (0, 5))
    """
    if isinstance(exclude_sink, bool):
        return FIRST_TOKEN if exclude_sink else ()
    return check_keys(exclude_sink, "exclude_sink")


def without_name(keys: tuple[int, ...]) -> str:
    """What is added to the name of a result without some keys.

    >>> without_name(()), without_name((0,)), without_name((0, 5))
    ('', '_without_sink', '_without_keys_0_5')
    """
    if not keys:
        return ""
    return "_without_sink" if keys == FIRST_TOKEN else "_without_keys_" + "_".join(map(str, keys))


def without_phrase(keys: tuple[int, ...]) -> str:
    """The same in words, for the description of a result.

    >>> without_phrase(()), without_phrase((0,)), without_phrase((0, 5))
    ('', ', without the first token', ', without keys 0, 5')
    """
    if not keys:
        return ""
    return ", without the first token" if keys == FIRST_TOKEN else f", without keys {', '.join(map(str, keys))}"


def rows_without(rows: Rows, keys: tuple[int, ...]) -> tuple[Rows, Bool[Tensor, "batch head_or_1 query"]]:
    """Rows without some keys and without a sink that is no token, distributions again; and which have anything left.

    Without keys to leave out these are the rows as they are.
    """
    if not keys:
        return rows, rows.valid.unsqueeze(1)
    pattern, left = without_keys(rows.pattern, keys)
    return replace(rows, pattern=pattern, factors=None, given_sums=None, sink=None), left
