"""One watched site: collects what passes there, forward by forward, and feeds rows to the analyzers.

A decode step brings one row. Handing it to every analyzer at once would cost dozens of small kernel launches a layer
and token, so rows wait in a small buffer (`block` rows) and go on together; nothing an analyzer computes depends on
how rows are grouped. A prompt's rows go on at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.gram import ROWS_PER_PASS
from attnprobe.hosts.base import Site
from attnprobe.row_policy import RowAudit
from attnprobe.rows import Rows
from attnprobe.sequences import Plan, Sequences
from attnprobe.state.statistic import StatisticPool
from attnprobe.verify import verify_outputs, verify_parts

# Decode rows that wait for one another. With a trace the Gram matrix takes ROWS_PER_PASS rows in one pass.
BLOCK = 32


@dataclass(frozen=True)
class SiteValues:
    """What the analyzers of one site found on one batch of sequences.

    Attributes:
        final: variable -> [batch, head] or [batch, head, position], over all rows.
        trace: variable -> [batch, head, row] at each traced row.
        position: [batch, row] position of each traced row, -1 where it is padding.
    """

    final: dict[str, Tensor]
    trace: dict[str, Tensor]
    position: Int[Tensor, "batch row"]


class SiteStream:
    """The analyzers of one site on one batch of sequences.

    Args:
        site: where.
        analyzers: settings; each is started afresh on a pool of statistics they share.
        heads: watched heads, None for all.
        policy: what to do with rows that do not sum to 1 ("error", "renormalize", "sink").
        queries, keys: the sequences of the queries and of the keys (the same but for cross-attention).
        leverage: leverage scores of the unembedding, for analyzers that ask.
        verify: check once that the shapes are what the hooks promise and that z is the pattern times v.
    """

    def __init__(
        self,
        site: Site,
        analyzers: Sequence[Analyzer],
        *,
        heads: tuple[int, ...] | None,
        policy: str,
        queries: Sequences,
        keys: Sequences,
        leverage: Tensor | None = None,
        verify: bool = False,
    ) -> None:
        self.site = site
        self._prototypes = tuple(analyzers)
        self._leverage = leverage
        pool = StatisticPool()
        self._analyzers = [analyzer.start(pool, leverage) for analyzer in analyzers]
        self._heads = heads
        self._policy = policy
        self._queries = queries
        self._keys = keys
        # an encoder reads all at once: it has no steps to trace
        self._traced = site.kind != "bidirectional" and any(analyzer.trace for analyzer in analyzers)
        self._capacity = ROWS_PER_PASS if self._traced else BLOCK
        self._verify = verify
        self._audit = RowAudit(site.name, heads, policy)
        self._n_heads = 0
        self._buffer: dict[str, Tensor] = {}
        self._waiting = 0
        self._first_slot = 0
        self._trace: list[dict[str, Tensor]] = []
        self._trace_position: list[Tensor] = []

    def take(self, parts: dict[str, Tensor], plan: Plan) -> None:
        """Take what passed at the site in one forward; all parts of it."""
        if plan.regenerate:
            self._restart_generation()
        self._n_heads = parts["pattern"].shape[1]
        if self._verify:
            verify_parts(self.site.name, parts, self._heads)
        selected = {name: self._select(name, value, plan) for name, value in parts.items()}
        if plan.new == 1 and self._bufferable(selected["pattern"]):
            self._wait(selected, plan)
        else:
            self.flush()
            self._process(selected, plan.start, plan.new, plan.trace_from)

    def flush(self) -> None:
        """Let waiting rows go on."""
        if self._waiting:
            n, start = self._waiting, self._first_slot
            parts = {}
            for name, value in self._buffer.items():
                part = value[:, :, :n] if name in _SQUARE else value[:, :n]
                parts[name] = part[..., : start + n] if name in _SQUARE and self._is_self else part
            self._waiting = 0
            self._buffer = {}
            self._process(parts, start, n, 0 if self._traced else None)

    def values(self) -> SiteValues:
        """What the analyzers say over all rows so far."""
        self.flush()
        self._audit.check()
        final: dict[str, Tensor] = {}
        for analyzer in self._analyzers:
            for name, value in _checked(analyzer, self._queries.batch, self._keys.width).items():
                if name in final:
                    raise ValueError(
                        f"two analyzers both report {name!r}: put them in two probes, or rename one result."
                    )
                final[name] = value
        trace = {}
        if self._trace:
            trace = {name: torch.cat([part[name] for part in self._trace], -1) for name in self._trace[0]}
        empty = torch.zeros(self._queries.batch, 0, dtype=torch.int64)
        position = torch.cat(self._trace_position, 1) if self._trace_position else empty
        return SiteValues(final, trace, position)

    # -- collecting ----------------------------------------------------------------------------------------

    @property
    def _is_self(self) -> bool:
        return self.site.kind != "cross"

    def _select(self, name: str, value: Tensor, plan: Plan) -> Tensor:
        """The watched heads and the new rows of one part."""
        value = value.detach()
        if name in _SQUARE:
            value = value[:, :, plan.skip :]
            return value if self._heads is None else value[:, list(self._heads)]
        if name in ("z", "q"):
            value = value[:, plan.skip :]
            return value if self._heads is None else value[:, :, list(self._heads)]
        return value[:, plan.skip :] if self._is_self else value

    def _bufferable(self, pattern: Tensor) -> bool:
        return self._is_self and self.site.kind == "causal" and pattern.shape[2] == 1

    def _wait(self, parts: dict[str, Tensor], plan: Plan) -> None:
        if not self._waiting:
            self._first_slot = plan.start
        at = self._waiting
        for name, value in parts.items():
            if name in _SQUARE:
                self._square_buffer(name, value)
                n_key = value.shape[-1]
                end = plan.start + 1  # slots seen, this row's included
                value = value[..., :end] if n_key > end else value
                self._buffer[name][:, :, at, end - value.shape[-1] : end] = value[:, :, 0]
            else:
                if name not in self._buffer:
                    self._buffer[name] = value.new_empty(value.shape[0], self._capacity, *value.shape[2:])
                self._buffer[name][:, at] = value[:, 0]
        self._waiting += 1
        if self._waiting == self._capacity:
            self.flush()

    def _square_buffer(self, name: str, value: Tensor) -> None:
        if name not in self._buffer:
            batch, heads = value.shape[:2]
            width = self._first_slot + self._capacity
            self._buffer[name] = value.new_zeros(batch, heads, self._capacity, width)

    # -- feeding -------------------------------------------------------------------------------------------

    def _process(self, parts: dict[str, Tensor], start: int, new: int, trace_from: int | None) -> None:
        rows = self._rows(parts, start, new)
        if self._verify:
            self._verify = False
            if start == 0 and self._policy != "sink":
                verify_outputs(self.site.name, rows)
        untraced = new if trace_from is None or not self._traced else trace_from
        if untraced:
            self._update(rows[:untraced] if untraced < new else rows)
        for low in range(untraced, new, ROWS_PER_PASS):
            part = rows[low : min(low + ROWS_PER_PASS, new)]
            values: dict[str, Tensor] = {}
            for analyzer in self._analyzers:
                if analyzer.trace:
                    values |= analyzer.trace_rows(part)
            self._trace.append(values)
            self._trace_position.append(part.position)
            self._update(part)

    def _update(self, rows: Rows) -> None:
        for analyzer in self._analyzers:
            analyzer.update(rows)

    def _rows(self, parts: dict[str, Tensor], start: int, new: int) -> Rows:
        """Real tokens only, by position, every row a distribution."""
        queries, keys = self._queries, self._keys
        position = queries.positions(start, new)
        pattern = _by_slot(parts["pattern"], start + new if self._is_self else parts["pattern"].shape[-1])
        dtype = torch.float64 if pattern.dtype == torch.float64 else torch.float32
        given = pattern.dtype
        if queries.padded:
            pattern = torch.where((position >= 0)[:, None, :, None], pattern, 0.0)
        if keys.padded:
            pattern = _by_position(pattern, keys)
        pattern = pattern.to(dtype)
        sums = self._audit.look(pattern, position, given)
        fields: dict[str, Tensor] = {name: parts[name].to(dtype) for name in ("z", "q") if name in parts}
        sink = None
        if self._policy == "renormalize":
            pattern = pattern / sums.unsqueeze(-1)
            if "z" in fields:  # linear in the row
                fields["z"] = fields["z"] / sums.transpose(1, 2).unsqueeze(-1)
        elif self._policy == "sink":
            sink = (1 - sums).clamp_min(0.0)
        if "scores" in parts:
            scores = _by_slot(parts["scores"], pattern.shape[-1]).to(dtype)
            fields["scores"] = _by_position(scores, keys) if keys.padded else scores
        new_keys: dict[str, Any] = {name: parts[name].to(dtype) for name in ("v", "k") if name in parts}
        if new_keys and not self._is_self and start > 0:
            new_keys = {}  # the keys of cross-attention came with the first rows
        key_position = position if self._is_self else keys.positions(0, parts["pattern"].shape[-1])
        return Rows(
            pattern=pattern,
            position=position,
            first=start,  # a position is never beyond its slot
            causal=self.site.kind == "causal",
            self_attention=self._is_self,
            prompt_length=queries.prompt_length if self.site.kind == "causal" else None,
            shortest_prompt=queries.shortest_prompt,
            tokens=keys.tokens_by_position(start + new if self._is_self else keys.seen),
            sink=sink,
            key_position=key_position if new_keys else None,
            kv_head=self._kv_head(parts),
            **fields,  # type: ignore[arg-type] # z and q alone
            **new_keys,
        )

    def _kv_head(self, parts: dict[str, Tensor]) -> Tensor | None:
        """The key/value head of each watched head: groups of equal size, in order."""
        heads = self._heads or tuple(range(self._n_heads))
        for name in ("v", "k"):
            if name in parts:
                group = self._n_heads // parts[name].shape[2]
                return torch.tensor([head // group for head in heads], device=parts[name].device)
        return None

    def _restart_generation(self) -> None:
        """The prompt has grown: analyzers of the generation block begin again, and so does the trace."""
        self.flush()
        pool = StatisticPool()
        for i, prototype in enumerate(self._prototypes):
            if getattr(prototype, "scope", "prefix") != "prefix":
                self._analyzers[i] = prototype.start(pool, self._leverage)
        self._trace, self._trace_position = [], []


def _checked(analyzer: Analyzer, batch: int, n_keys: int) -> dict[str, Tensor]:
    """What an analyzer computes, if it has the form of a result."""
    name, computed = type(analyzer).__name__, analyzer.compute()
    if not isinstance(computed, dict) or not computed:
        raise TypeError(f"{name}.compute() gave {type(computed).__name__}, not a dict of name to [batch, head] tensor.")
    for key, value in computed.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape is None or len(shape) not in (2, 3) or shape[0] != batch:
            raise ValueError(
                f"{name}.compute() gave {key!r} of shape {shape}; a result is [batch, head] or [batch, head, position] "
                f"with {batch} sequences. A value a row is not a result: sum over rows, or use trace=True."
            )
        if len(shape) == 3 and shape[2] not in (n_keys, n_keys - 1, n_keys + 1):
            raise ValueError(
                f"{name}.compute() gave {key!r} with {shape[2]} entries on the position axis and there are {n_keys} "
                "tokens. Rows come in chunks of any size, so a value a row cannot be summed by its place in the chunk: "
                "use trace=True for values at every step."
            )
    return {key: value if value.dtype == torch.float64 else value.float() for key, value in computed.items()}


_SQUARE = ("pattern", "scores")


def _by_slot(square: Float[Tensor, "batch head query key"], slots: int) -> Tensor:
    """Columns by slot. A sliding window shows the last keys only; a static cache shows slack after the last one."""
    n_key = square.shape[-1]
    if n_key > slots:
        return square[..., :slots]
    return torch.nn.functional.pad(square, (slots - n_key, 0)) if n_key < slots else square


def _by_position(square: Tensor, keys: Sequences) -> Tensor:
    order, real = keys.key_order(square.shape[-1])
    index = order[:, None, None, :].expand(*square.shape[:3], order.shape[1])
    return square.gather(-1, index) * real[:, None, None, :]
