"""One watched site: collects what passes there, forward by forward, and feeds rows to the analyzers.

A decode step brings one row. Handing it to every analyzer at once would cost dozens of small kernel launches a layer
and token, so rows wait in a small buffer and go on together. A prompt's rows go on at once, in blocks small enough
for the processor's cache, so that nothing of the size of a pattern is made beside the host's. Nothing an analyzer
computes depends on how rows are grouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.analyzers.tracing import Tracer, feed
from attnprobe.functional.gram import ROWS_PER_PASS
from attnprobe.hosts.base import Attention, Site
from attnprobe.key_history import KeyHistory
from attnprobe.row_builder import RowBuilder
from attnprobe.rows import Rows
from attnprobe.sequences import Plan, Sequences
from attnprobe.state.statistic import StatisticPool
from attnprobe.verify import verify_mask, verify_outputs, verify_parts

# Decode rows that wait for one another. With a trace the Gram matrix takes ROWS_PER_PASS rows in one pass.
BLOCK = 32
# Rows that wait as queries are small: [head, d] each, whatever the number of keys.
QUERY_BLOCK = 64


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
        needs: the parts that analyzers ask for.
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
        needs: Sequence[str],
        heads: tuple[int, ...] | None,
        policy: str,
        queries: Sequences,
        keys: Sequences,
        leverage: Tensor | None = None,
        verify: bool = False,
    ) -> None:
        self.site = site
        self._needs = frozenset(needs)
        self._prototypes = tuple(analyzers)
        self._leverage = leverage
        pool = StatisticPool()
        self._analyzers = [analyzer.start(pool, leverage) for analyzer in analyzers]
        self._heads = heads
        self._policy = policy
        self._queries = queries
        self._keys = keys
        self._builder = RowBuilder(site, heads, policy, queries, keys)
        # an encoder reads all at once: it has no steps to trace
        self._tracer = Tracer(self._analyzers if site.kind != "bidirectional" else [])
        self._verify = verify
        self._n_heads = 0
        self._history = KeyHistory()
        self._attention: Attention | None = None
        self._buffer: dict[str, Tensor] = {}
        self._capacity = 0
        self._waiting = 0
        self._first_slot = 0

    def take(self, parts: dict[str, Tensor], plan: Plan) -> None:
        """Take what passed at the site in one forward; all parts of it."""
        if plan.regenerate:
            self._restart_generation()
        self._n_heads = parts["pattern"].shape[1]
        if self._verify:
            verify_parts(self.site.name, parts, self._heads)
        self._capacity = ROWS_PER_PASS if self._tracer.active else BLOCK
        self._go_on({name: self._select(name, value, plan) for name, value in parts.items()}, plan)

    def take_attention(self, attention: Attention, plan: Plan) -> None:
        """Take an attention that came without a pattern."""
        if plan.regenerate:
            self._restart_generation()
        self._n_heads = attention.q.shape[1]
        if self._verify and self._heads is not None and max(self._heads) >= self._n_heads:
            raise ValueError(
                f"head {max(self._heads)} was asked for and {self.site.name} has heads 0 to {self._n_heads - 1}."
            )
        if plan.new > 1:
            verify_mask(self.site.name, attention, self._queries, plan)
        seen, n_query = plan.start + plan.new, attention.q.shape[2]
        if attention.k.shape[2] < seen:
            self.flush()  # the cache has begun to slide
        self._history.see(attention.k, new=plan.new, seen=seen)
        self._attention = attention
        parts = {"rot_q": attention.q.transpose(1, 2), "z": attention.z}
        if "v" in self._needs or self._verify:
            parts["v"] = attention.v[:, :, :seen][:, :, -n_query:].transpose(1, 2)
        self._capacity = QUERY_BLOCK
        self._go_on({name: self._select(name, value, plan) for name, value in parts.items()}, plan)

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
            self._process(parts, start, n, 0 if self._tracer.active else None)

    def values(self) -> SiteValues:
        """What the analyzers say over all rows so far."""
        self.flush()
        self._builder.audit.check()
        final: dict[str, Tensor] = {}
        for analyzer in self._analyzers:
            for name, value in _checked(analyzer, self._queries.batch, self._keys.width).items():
                if name in final:
                    raise ValueError(
                        f"two analyzers both report {name!r}: put them in two probes, or rename one result."
                    )
                final[name] = value
        trace, position = self._tracer.values(self._queries.batch)
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
        if name in ("z", "q", "rot_q"):
            value = value[:, plan.skip :]
            return value if self._heads is None else value[:, :, list(self._heads)]
        return value[:, plan.skip :] if self._is_self else value

    def _go_on(self, parts: dict[str, Tensor], plan: Plan) -> None:
        if plan.new == 1 and self.site.kind == "causal":
            self._wait(parts, plan)
        else:
            self.flush()
            self._process(parts, plan.start, plan.new, plan.trace_from)

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
        untraced = new if trace_from is None or not self._tracer.active else trace_from
        feed(rows, self._analyzers, self._tracer, untraced)

    def _rows(self, parts: dict[str, Tensor], start: int, new: int) -> Rows:
        if "pattern" in parts:
            return self._builder.from_pattern(parts, self._n_heads, start, new)
        assert self._attention is not None
        scaling, window = self._attention.scaling, self._attention.window
        return self._builder.from_factors(parts, self._history.keys, scaling, window, self._n_heads, start, new)

    def _restart_generation(self) -> None:
        """The prompt has grown: analyzers of the generation block begin again, and so does the trace."""
        self.flush()
        pool = StatisticPool()
        for i, prototype in enumerate(self._prototypes):
            if getattr(prototype, "scope", "prefix") != "prefix":
                self._analyzers[i] = prototype.start(pool, self._leverage)
        self._tracer = Tracer(self._analyzers)


def _checked(analyzer: Analyzer, batch: int, n_keys: int) -> dict[str, Tensor]:
    """What an analyzer computes, if it has the form of a result."""
    name, computed = type(analyzer).__name__, analyzer.compute()
    if not isinstance(computed, dict) or not (computed or analyzer.only_traces):
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
