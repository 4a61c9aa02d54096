"""Feeding rows to analyzers: in blocks where only the final value is wanted, prefix by prefix where it is traced."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnprobe.analyzers.base import Analyzer, add_traces, refuse_two
from attnprobe.functional.gram import ROWS_PER_PASS
from attnprobe.rows import Rows

# Entries [batch, head, query, key] of a block of rows, and the rows that a block has at least: blocks stay in the
# processor's cache while one statistic after another reads them, and nothing of the size of a pattern is made.
BLOCK_ENTRIES = 5 << 19
BLOCK_ROWS = 64


def feed(rows: Rows, analyzers: Sequence[Analyzer], tracer: Tracer, untraced: int) -> None:
    """Let analyzers take rows, the first `untraced` of them in blocks, the others one prefix after another."""
    size = block_rows(rows.position.shape[0] * rows.n_head * rows.n_key, rows.position.device)
    for low in range(0, untraced, size):
        block = rows if size >= untraced == rows.n_query else rows[low : min(low + size, untraced)]
        for analyzer in analyzers:
            analyzer.update(block)
    if untraced < rows.n_query:
        tracer.take(rows[untraced : rows.n_query] if untraced else rows, analyzers)


def block_rows(row_entries: int, device: torch.device) -> int:
    """How many rows of so many entries [batch, head, key] go on together. An accelerator wants more at once."""
    entries = BLOCK_ENTRIES if device.type == "cpu" else 64 * BLOCK_ENTRIES
    return max(BLOCK_ROWS, entries // max(1, row_entries))


class Tracer:
    """The traces of the analyzers of one site.

    An analyzer with `stride` k is asked at every k-th step of each sequence, from its first one on; between them its
    last value stands.

    Args:
        analyzers: those with `trace` are traced.
        rows_per_pass: rows that are traced together.
    """

    def __init__(self, analyzers: Sequence[Analyzer], rows_per_pass: int = ROWS_PER_PASS) -> None:
        self._rows_per_pass = rows_per_pass
        self._traced = [analyzer for analyzer in analyzers if analyzer.trace]
        self._together: dict[tuple[type[Analyzer], int], list[Analyzer]] = {}
        for analyzer in self._traced:
            self._together.setdefault((type(analyzer), analyzer.stride), []).append(analyzer)
        self._values: list[dict[str, Tensor]] = []
        self._position: list[Int[Tensor, "batch row"]] = []
        self._stride: dict[str, int] = {}
        self._asked: dict[int, list[Bool[Tensor, "batch row"]]] = {}

    @property
    def active(self) -> bool:
        """Whether anything is traced."""
        return bool(self._traced)

    def take(self, rows: Rows, analyzers: Sequence[Analyzer]) -> None:
        """Trace rows and let all analyzers take them in."""
        asked = {stride: _asked(rows, stride) for stride in {analyzer.stride for analyzer in self._traced}}
        for low, high in _cuts(rows.n_query, asked, self._rows_per_pass):
            part = rows[low:high]
            values: dict[str, Tensor] = {}
            for (_, stride), some in self._together.items():
                traced = _trace(some, part, asked[stride], low)
                for name in traced:
                    if self._stride.setdefault(name, stride) != stride:
                        refuse_two(name)
                add_traces(values, traced)
            for stride, at in asked.items():
                if at is not None:
                    self._asked.setdefault(stride, []).append(at.mask[:, low:high])
            self._values.append(values)
            self._position.append(part.position)
            for analyzer in analyzers:
                analyzer.update(part)

    def values(self, batch: int) -> tuple[dict[str, Float[Tensor, "batch head row"]], Int[Tensor, "batch row"]]:
        """Every traced variable and the positions of the rows."""
        if not self._values:
            return {}, torch.zeros(batch, 0, dtype=torch.int64)
        position = torch.cat(self._position, 1)
        rows = [part.shape[1] for part in self._position]
        trace = {}
        for name in dict.fromkeys(name for part in self._values for name in part):
            trace[name] = _joined([part.get(name) for part in self._values], rows)
            if self._stride[name] > 1:
                trace[name] = _held(trace[name], torch.cat(self._asked[self._stride[name]], 1))
        for analyzer in self._traced:
            late = analyzer.late_trace()
            trace |= {name: _last_rows(value, position.shape[1]) for name, value in late.items()}
        return trace, position


def _last_rows(value: Float[Tensor, "batch head row"], n_rows: int) -> Float[Tensor, "batch head row"]:
    """The last rows; NaN before those that there are: what came before a prompt was complete has no value."""
    missing = n_rows - value.shape[-1]
    if missing <= 0:
        return value[..., -missing:]
    return torch.nn.functional.pad(value, (missing, 0), value=torch.nan)


@dataclass(frozen=True)
class _Asked:
    """Rows [batch, query] at which a value is asked for, and which of them are so for some sequence."""

    mask: Tensor
    rows: frozenset[int]


def _asked(rows: Rows, stride: int) -> _Asked | None:
    """The rows of every stride-th step; None for all rows."""
    if stride == 1:
        return None
    step = rows.position if rows.prompt_length is None else rows.position - rows.prompt_length[:, None] + 1
    mask = (step % stride == 0) & (step >= 0) & rows.valid
    return _Asked(mask, frozenset(mask.any(0).nonzero().flatten().tolist()))


def _cuts(n_rows: int, asked: dict[int, _Asked | None], rows_per_pass: int) -> list[tuple[int, int]]:
    """Chunks of rows: a row that is asked for at a stride begins one."""
    begins = {0, n_rows}
    for some in asked.values():
        begins |= some.rows if some is not None else frozenset()
    ordered = sorted(begins)
    size = rows_per_pass if None in asked.values() else n_rows  # only rows that are traced need small chunks
    return [
        (low, min(low + size, stop)) for start, stop in itertools.pairwise(ordered) for low in range(start, stop, size)
    ]


def _trace(analyzers: Sequence[Analyzer], part: Rows, asked: _Asked | None, low: int) -> dict[str, Tensor]:
    """The values of a chunk's rows; with a stride, of its first one alone, and NaN at the others."""
    together = type(analyzers[0]).trace_together
    if asked is None:
        return together(analyzers, part)
    if low not in asked.rows:
        return {}
    first = torch.arange(part.n_query, device=part.position.device) == 0
    wanted = (asked.mask[:, low : low + 1] & first)[:, None]
    values = together(analyzers, part[:1])
    return {name: torch.where(wanted, value, torch.nan) for name, value in values.items()}


def _joined(parts: Sequence[Tensor | None], rows: Sequence[int]) -> Float[Tensor, "batch head row"]:
    """All chunks of one variable; NaN where one has no value."""
    like = next(part for part in parts if part is not None)
    return torch.cat(
        [
            like.new_full((*like.shape[:2], n), torch.nan) if part is None else part
            for part, n in zip(parts, rows, strict=True)
        ],
        -1,
    )


def _held(value: Float[Tensor, "batch head row"], asked: Bool[Tensor, "batch row"]) -> Float[Tensor, "batch head row"]:
    """The value of the last row that was asked for, at every row; NaN before the first."""
    row = torch.arange(value.shape[-1], device=value.device)
    last = torch.where(asked, row, -1).cummax(-1).values[:, None].expand_as(value)
    return torch.where(last >= 0, value.gather(-1, last.clamp_min(0)), torch.nan)
