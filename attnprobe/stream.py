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
from attnprobe.analyzers.tracing import Tracer, block_rows
from attnprobe.functional.gram import ROWS_PER_PASS
from attnprobe.hosts.base import Attention, Site
from attnprobe.key_history import KeyHistory
from attnprobe.row_builder import RowBuilder, columns_by_slot
from attnprobe.rows import Rows
from attnprobe.sequences import Plan, Sequences
from attnprobe.state.statistic import StatisticPool
from attnprobe.verify import refuse_mask, verify_mask, verify_outputs, verify_parts

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
        self._rule: tuple[float, int | None] = (1.0, None)  # scaling and window
        self._wrong_mask: Tensor | None = None
        self._capacity = 0
        self._waiting: list[dict[str, Tensor]] = []
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
        wrong = verify_mask(self.site.name, attention, self._queries, plan)
        if wrong is not None:  # on an accelerator, told with the results
            self._wrong_mask = wrong if self._wrong_mask is None else self._wrong_mask | wrong
        seen = plan.start + plan.new
        self._history.see(attention.k, new=plan.new, seen=seen)
        self._rule = attention.scaling, attention.window
        parts = {"rot_q": attention.q.transpose(1, 2), "z": attention.z}
        if "v" in self._needs or self._verify:
            parts["v"] = attention.v.transpose(1, 2)
        self._capacity = QUERY_BLOCK
        self._go_on({name: self._select(name, value, plan) for name, value in parts.items()}, plan)

    def flush(self) -> None:
        """Let waiting rows go on."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            n, start = len(waiting), self._first_slot
            parts = {name: _joined([row[name] for row in waiting], name, start) for name in waiting[0]}
            self._process(parts, start, n, 0 if self._tracer.active else None)

    def values(self) -> SiteValues:
        """What the analyzers say over all rows so far."""
        self.flush()
        self._builder.audit.check()
        if self._wrong_mask is not None and bool(self._wrong_mask):
            refuse_mask(self.site.name)
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
        if value.requires_grad:
            value = value.detach()
        heads = self._heads
        if name in _SQUARE:
            value = value[:, :, plan.skip :] if plan.skip else value
            return value if heads is None else value[:, list(heads)]
        if not self._is_self and name in ("k", "v"):
            return value
        if name in ("k", "v"):  # a cache may show past values too, and slack behind them
            value = value[:, : plan.start + plan.new][:, -plan.new :]
        elif plan.skip:
            value = value[:, plan.skip :]
        return value if heads is None or name in ("k", "v") else value[:, :, list(heads)]

    def _go_on(self, parts: dict[str, Tensor], plan: Plan) -> None:
        if not self._queries.width:  # a first chunk that is padding for every sequence
            return
        if plan.new > 1 or self.site.kind != "causal":
            self.flush()
            self._process(parts, plan.start, plan.new, plan.trace_from)
            return
        if not self._waiting:
            self._first_slot = plan.start
        # a row of values may be a view of the whole cache, which it would keep alive
        self._waiting.append({name: part.clone() if name in ("k", "v") else part for name, part in parts.items()})
        if len(self._waiting) == self._capacity:
            self.flush()

    # -- feeding -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _process(self, parts: dict[str, Tensor], start: int, new: int, trace_from: int | None) -> None:
        untraced = new if trace_from is None or not self._tracer.active else trace_from
        size = self._block_rows(parts, start + new)
        for low in range(0, untraced, size):
            high = min(low + size, untraced)
            rows = self._rows(self._cut(parts, low, high) if high - low < new else parts, start + low, high - low)
            for analyzer in self._analyzers:
                analyzer.update(rows)
        if untraced < new:
            rest = self._cut(parts, untraced, new) if untraced else parts
            self._tracer.take(self._rows(rest, start + untraced, new - untraced), self._analyzers)
        if self._verify:
            self._verify = False
            if start == 0 and self._policy != "sink" and "v" in parts and self._is_self:
                last = self._rows(self._cut(parts, new - 1, new), new - 1, 1)
                verify_outputs(self.site.name, last, parts["v"], self._queries.positions(0, new, parts["v"].device))

    def _cut(self, parts: dict[str, Tensor], low: int, high: int) -> dict[str, Tensor]:
        """Some of the new rows, without the columns of later ones."""
        some = {}
        for name, value in parts.items():
            if name in _SQUARE:
                later = value.shape[2] - high if self.site.kind == "causal" else 0
                some[name] = value[:, :, low:high, : value.shape[3] - later]
            else:  # the keys of cross-attention are not those of the rows
                some[name] = value if name in ("k", "v") and not self._is_self else value[:, low:high]
        return some

    def _block_rows(self, parts: dict[str, Tensor], n_key: int) -> int:
        """How many rows go on together. What looks ahead pairs rows with later ones: it goes on whole."""
        if self.site.kind != "causal":
            return max(1, parts["pattern"].shape[2])
        heads = self._n_heads if self._heads is None else len(self._heads)
        return block_rows(self._queries.batch * heads * n_key, parts["pattern" if "pattern" in parts else "z"].device)

    def _rows(self, parts: dict[str, Tensor], start: int, new: int) -> Rows:
        if "pattern" in parts:
            return self._builder.from_pattern(parts, self._n_heads, start, new)
        return self._builder.from_factors(parts, self._history.keys, *self._rule, self._n_heads, start, new)

    def _restart_generation(self) -> None:
        """The prompt has grown: analyzers of the generation block begin again, and so does the trace."""
        self.flush()
        pool = StatisticPool()
        for i, prototype in enumerate(self._prototypes):
            if getattr(prototype, "scope", "prefix") != "prefix":
                self._analyzers[i] = prototype.start(pool, self._leverage)
        for analyzer in self._analyzers:
            analyzer.begin_generation()
        self._tracer = Tracer(self._analyzers)


def _joined(rows: list[Tensor], name: str, start: int) -> Tensor:
    """Decode rows, one tensor each, as one chunk; rows of a pattern by slot, nothing beyond their own."""
    if name not in _SQUARE:
        return torch.cat(rows, 1)
    absent = -torch.inf if name == "scores" else 0.0
    by_slot = [columns_by_slot(row, start + i + 1, absent) for i, row in enumerate(rows)]
    slots = start + len(rows)
    return torch.cat([torch.nn.functional.pad(row, (0, slots - row.shape[-1]), value=absent) for row in by_slot], 2)


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
