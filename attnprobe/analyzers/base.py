"""The base class of analyzers: two short methods make one.

An analyzer watches one attention site. `update` takes the next rows, `compute` gives one value a sequence and
head; merging, resetting and per-step traces come with the base class.

>>> import torch
>>> from attnprobe import Analyzer, Rows
>>> class SinkMass(Analyzer):
...     "Mean attention to the first token."
...     def update(self, rows):
...         self.accumulate(mass=rows.pattern[..., 0].sum(-1), rows=rows.count[:, None])
...     def compute(self):
...         return {"sink_mass": self.total["mass"] / self.total["rows"]}
>>> analyzer = SinkMass()
>>> analyzer.update(Rows.from_pattern(torch.eye(4).reshape(1, 1, 4, 4)))
>>> analyzer.compute()["sink_mass"].tolist()
[[0.25]]
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.rows import Rows
from attnprobe.state.statistic import S, Statistic, StatisticPool, padded_sum, statistic_key

A = TypeVar("A", bound="Analyzer")


class Analyzer:
    """Base class of everything that a `Probe` computes on the rows of one attention site.

    Class attributes a subclass may set:
        needs: which tensors the rows must carry, among "pattern", "z", "v", "k", "q", "scores", "tokens".
        variables: name of each result -> attributes (long_name, units, source) for the labelled results.

    Args:
        trace: also keep the value at every step (for generation: the prefix that chose each token), in
            addition to the final one.
        stride: compute the trace at every stride-th step only, from the first one on, and hold it between.

    Raises:
        ValueError: a stride that is no whole number of at least 1.
    """

    needs: tuple[str, ...] = ("pattern",)
    variables: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    trace: bool = False
    stride: int = 1
    layers: str | Sequence[int] | None = None  # those of the probe
    only_traces: bool = False  # `compute` has nothing to say

    def __init__(self, *, trace: bool = False, stride: int = 1) -> None:
        if isinstance(stride, bool) or not isinstance(stride, Integral) or stride < 1:
            raise ValueError(f"stride={stride!r}: use a whole number of steps, at least 1.")
        self.trace = trace
        self.stride = int(stride)

    # -- what a subclass writes ---------------------------------------------------------------------------

    def update(self, rows: Rows) -> None:
        """Take the next rows of every sequence. Padded rows are zero and do not count (`rows.count`).

        Rows are to be read only: they may be the model's own tensors.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(self, rows).")

    def compute(self) -> dict[str, Float[Tensor, "batch head"]]:
        """The values over all rows so far, by variable name: [batch, head] or [batch, head, position]."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(self).")

    # -- what a subclass may use ----------------------------------------------------------------------------

    @property
    def total(self) -> Totals:
        """Sums kept by `accumulate`."""
        totals: Totals = self.__dict__.setdefault("_totals", Totals())
        return totals

    def accumulate(self, **addends: Tensor) -> None:
        """Add to running sums, on the device.

        A sum has no query axis: sum over the rows first. The last axis of a [batch, head, key] sum grows with the keys.
        """
        for name, addend in addends.items():
            if not addend.is_floating_point():
                addend = addend.to(torch.int64)
            if addend.ndim >= 3:
                self.total[name] = padded_sum(self.total.get(name), addend)
            else:
                before = self.total.get(name)
                self.total[name] = addend.clone() if before is None else before + addend

    def use(self, kind: type[S], scope: str = "prefix", **options: Hashable) -> S:
        """A streaming statistic shared with the other analyzers of this site; it is the analyzer's to update."""
        statistic = self.pool.get(kind, scope, **options)
        self.__dict__.setdefault("_used", {})[statistic_key(kind, scope, options)] = statistic
        return statistic

    @property
    def pool(self) -> StatisticPool:
        """Where shared statistics live: the site's under a probe, the analyzer's own otherwise."""
        pool: StatisticPool = self.__dict__.setdefault("_pool", StatisticPool())
        return pool

    @property
    def leverage(self) -> Float[Tensor, "vocab"] | None:
        """Leverage scores of the host's unembedding rows, for analyzers that weigh keys by token."""
        return self.__dict__.get("_leverage")

    # -- what comes with it ---------------------------------------------------------------------------------

    def at(self: A, layers: str | Sequence[int]) -> A:
        """The same analyzer for some of the layers that its probe watches: "middle", "center" or layer numbers.

        >>> import attnprobe as ap
        >>> probe = ap.Probe([ap.SelfAttention(), ap.IntrinsicTDO().at([3, 4])], layers="all")
        """
        some = copy.copy(self)
        some.layers = layers if isinstance(layers, str) else tuple(layers)
        return some

    def start(self: A, pool: StatisticPool | None = None, leverage: Tensor | None = None) -> A:
        """A fresh analyzer with the same settings, on the given pool of shared statistics."""
        fresh = copy.copy(self)
        fresh.__dict__ = {k: copy.deepcopy(v) for k, v in self.__dict__.items() if k not in _STATE}
        fresh.__dict__["_pool"] = pool or StatisticPool()
        fresh.__dict__["_leverage"] = leverage
        return fresh

    def reset(self) -> None:
        """Forget every row."""
        for name in _STATE - {"_leverage"}:
            self.__dict__.pop(name, None)

    def merge(self, other: Analyzer) -> None:
        """Add what another analyzer of the same kind saw: other rows of the same sequences.

        Raises:
            TypeError: the other is of another class.
        """
        if type(other) is not type(self):
            raise TypeError(
                f"cannot merge {type(other).__name__} into {type(self).__name__}: merge analyzers of one class."
            )
        for (kind, scope, *options), statistic in other._statistics.items():
            self.use(kind, scope, **dict(options)).merge(statistic)
        self.accumulate(**other.total)

    def trace_rows(self, rows: Rows) -> dict[str, Float[Tensor, "batch head query"]]:
        """The value of the prefix that ends at each of these rows, before `update` has taken them.

        This general form replays the rows one at a time on a copy of the state. Analyzers whose prefixes can be
        had together override it.
        """
        replay = copy.deepcopy(self)
        values: list[dict[str, Tensor]] = []
        for i in range(rows.n_query):
            replay.update(rows[i : i + 1])
            values.append(replay.compute())
        wanted = [name for name, value in values[0].items() if value.ndim == 2]
        return {name: torch.stack([value[name] for value in values], -1) for name in wanted}

    @classmethod
    def trace_together(
        cls: type[A], analyzers: Sequence[A], rows: Rows
    ) -> dict[str, Float[Tensor, "batch head query"]]:
        """`trace_rows` of several of this class at one site. A class that can compute them together overrides it."""
        values: dict[str, Tensor] = {}
        for analyzer in analyzers:
            add_traces(values, analyzer.trace_rows(rows))
        return values

    def begin_generation(self) -> None:
        """The prompt has grown (a chat goes on): what is counted within the generation begins again."""

    def late_trace(self) -> dict[str, Float[Tensor, "batch head row"]]:
        """Traces that are known only once all rows have come: the values at every row that `trace_rows` was shown."""
        return {}

    @property
    def _statistics(self) -> dict[Any, Statistic]:
        return self.__dict__.get("_used", {})

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in self.__dict__.items() if not k.startswith("_"))
        return f"{type(self).__name__}({settings})"


def add_traces(values: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Put traces in, by name.

    Raises:
        ValueError: another analyzer has traced something else under the same name.
    """
    for name, value in more.items():
        if name in values and not torch.equal(values[name].nan_to_num(), value.nan_to_num()):
            refuse_two(name)
        values[name] = value


def refuse_two(name: str) -> NoReturn:
    """Raise where two analyzers of one site trace different things under one name."""
    raise ValueError(
        f"two analyzers both trace {name!r} and their values differ: give one result another name, or use two probes "
        "(two calls of score)."
    )


class Totals(dict[str, Tensor]):
    """Running sums by name; a name that was never accumulated is told with those that were."""

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"nothing was accumulated as {name!r}: there are {', '.join(self) or 'no sums yet'}.")


_STATE = frozenset({"_totals", "_pool", "_used", "_leverage"})
