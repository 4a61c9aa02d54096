"""What every streaming statistic can do, and the pool through which analyzers share them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnprobe.rows import Rows

_serial = itertools.count()


class Statistic:
    """A sum over rows that can be updated with the next rows and merged with the sum of other rows.

    Several analyzers hold the same statistic and each of them updates it; only the first update with given rows
    counts, so it costs the same however many analyzers need it. The same holds for merging.

    Subclasses write `_update` and `_merge`.
    """

    def __init__(self) -> None:
        self._last_rows: int | None = None
        self._merged: set[int] = set()
        self._serial = next(_serial)

    def update(self, rows: Rows) -> None:
        """Take the next rows."""
        if rows.serial != self._last_rows:
            self._update(rows)
            self._last_rows = rows.serial

    def merge(self, other: Statistic) -> None:
        """Add the statistic of other rows of the same sequences."""
        if type(other) is not type(self):
            raise TypeError(f"cannot merge {type(other).__name__} into {type(self).__name__}.")
        if other._serial not in self._merged:
            self._merge(other)
            self._merged |= {other._serial}

    def _update(self, rows: Rows) -> None:
        raise NotImplementedError

    def _merge(self, other: Statistic) -> None:
        raise NotImplementedError


S = TypeVar("S", bound=Statistic)


class StatisticPool:
    """The statistics of one site: asked twice for the same one, it gives the same object."""

    def __init__(self) -> None:
        self._statistics: dict[Hashable, Statistic] = {}

    def get(self, kind: type[S], scope: str = "prefix", **options: Hashable) -> S:
        """The statistic of this kind over this scope, `kind(**options)`, made on first use."""
        key = statistic_key(kind, scope, options)
        if key not in self._statistics:
            self._statistics[key] = kind(**options)
        statistic = self._statistics[key]
        assert isinstance(statistic, kind)
        return statistic


def statistic_key(kind: type[Statistic], scope: str, options: Mapping[str, Hashable]) -> tuple[Any, ...]:
    """What tells one statistic of a site from another: (kind, scope), and (name, value) of every option."""
    return (kind, scope, *sorted(options.items()))


def padded_sum(total: Tensor | None, addend: Tensor) -> Tensor:
    """total + addend on the last axis, where either may have more keys than the other; `addend` is not kept."""
    if total is None:
        return addend.clone()
    missing = addend.shape[-1] - total.shape[-1]
    if missing > 0:
        total = torch.nn.functional.pad(total, (0, missing))
    total[..., : addend.shape[-1]] += addend
    return total


def added(total: Tensor | None, addend: Tensor | None) -> Tensor | None:
    """Sum of two optional tensors of one shape."""
    if total is None or addend is None:
        return addend if total is None else total
    return total + addend
