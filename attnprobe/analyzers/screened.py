"""Participation ratios of the prefix for one head a layer: the one whose generation block has the largest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.analyzers.tdo import TDO
from attnprobe.analyzers.tracing import Tracer, block_rows, feed
from attnprobe.functional.factored import Factors, joined
from attnprobe.functional.gram import ROWS_PER_PASS
from attnprobe.functional.screening import first_largest
from attnprobe.rows import Rows
from attnprobe.state.statistic import StatisticPool

# The generation block is float64, the prefix of the one-token case float32.
BLOCK_TIE, PREFIX_TIE = 1e-9, 1e-6
# Entries of the Gram matrices that are held at once while the chosen heads are replayed.
_GRAM_ENTRIES = 1 << 25
# Rows of the generation block that are traced together: its Gram matrix is small, so that passes cost little.
_BLOCK_ROWS_PER_PASS = 16


class ScreenedTDO(Analyzer):
    """Traces for SAUQ: participation ratio of the generation block of every head, and of the prefix of the chosen one.

    Which head is chosen is known at the end. Where the host shows queries and keys, they are kept (O(n d) a head), and
    at the end the rows of the chosen head alone are computed again, one head of one layer at a time, so that nothing
    of O(n^2) is held for the heads that lose. Their ratios are NaN, but for those that heads are compared by. Where the
    host makes patterns, all heads are followed as they come, and all have their ratios.

    Results are traces only: `participation_ratio_screened`, of the prefix, and `participation_ratio_generation`.

    Args:
        measure: as in `TDO`.
        block: "generation" (rows renormalised) or "generation-raw".
        screen: heads are compared at the last step ("final") or by their mean over steps ("mean").
        stride: the prefix ratio is computed at every stride-th step and held between; the block at every step.

    Source: [SG] arXiv 2610.06012, SAUQ.
    """

    only_traces = True

    def __init__(
        self, measure: str = "intrinsic", *, block: str = "generation", screen: str = "final", stride: int = 1
    ) -> None:
        super().__init__(trace=True)
        self.measure = measure
        self.block = block
        self.screen = screen
        self.prefix_stride = stride
        self._prefix_tdo = TDO(measure, lambda2=False, trace=True)
        self._prefix_tdo.stride = Analyzer(stride=stride).stride
        self._block_tdo = TDO(measure, scope=block, lambda2=False, trace=True)
        # not the name of `TDO`: a head that was not chosen has no value here
        options = [block.removeprefix("generation-")] if block != "generation" else []
        options += ([] if screen == "final" else [screen]) + ([] if stride == 1 else [f"stride{stride}"])
        self.prefix_name = "_".join([self._prefix_tdo.ratio_name, "screened", *options])
        self.block_name = self._block_tdo.ratio_name
        self.needs = self._prefix_tdo.needs
        self._kept = _Kept()

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results."""
        prefix = self._prefix_tdo.variables[self._prefix_tdo.ratio_name]
        described = {
            **prefix,
            "long_name": f"{prefix['long_name']}, of the chosen head",
            "stride": str(self.prefix_stride),
        }
        return {self.prefix_name: described, **self._block_tdo.variables}

    def start(self, pool: StatisticPool | None = None, leverage: Tensor | None = None) -> ScreenedTDO:
        fresh = super().start(pool, leverage)
        fresh._kept = _Kept()
        return fresh

    def reset(self) -> None:
        super().reset()
        self._kept = _Kept()

    def merge(self, other: Analyzer) -> None:
        raise TypeError("ScreenedTDO keeps rows in their order, so that of other rows cannot be merged into it.")

    def update(self, rows: Rows) -> None:
        if rows.serial != self._kept.traced_serial:  # `trace_rows` has taken those
            self._take(rows, traced=False)

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        """Nothing yet: see `late_trace`."""
        self._kept.traced_serial = rows.serial
        self._take(rows, traced=True)
        return {}

    def compute(self) -> dict[str, Tensor]:
        return {}

    def late_trace(self) -> dict[str, Float[Tensor, "batch head row"]]:
        kept = self._kept
        if kept.tracer is not None:
            traced = kept.tracer.values(0)[0]
            return {self.prefix_name: traced[self._prefix_tdo.ratio_name], self.block_name: traced[self.block_name]}
        if not kept.traced:
            return {}
        rows = kept.traced_rows()
        step, last = self._steps(rows)
        block = self._blocks(rows, step, last)
        prefix = torch.full(block.shape, torch.nan, dtype=rows.factors_or_raise.dtype, device=block.device)
        for sequences, heads in self._candidates(block, step, last):
            self._replay(prefix, block, sequences, heads)
        return {self.prefix_name: prefix, self.block_name: block}

    # -- rows as they come ------------------------------------------------------------------------------------

    def _take(self, rows: Rows, *, traced: bool) -> None:
        kept = self._kept
        if rows.factors is not None:
            kept.take(rows, traced=traced)
            return
        if kept.tracer is None:
            kept.analyzers = [self._prefix_tdo.start(StatisticPool(), self.leverage)]
        if kept.tracer is None or (kept.traced and not traced):  # the prompt begins, or has grown
            kept.analyzers[1:] = [self._block_tdo.start(StatisticPool(), self.leverage)]
            kept.tracer = Tracer(kept.analyzers)
        kept.traced = kept.traced + 1 if traced else 0
        feed(rows, kept.analyzers, kept.tracer, untraced=0 if traced else rows.n_query)

    # -- at the end -------------------------------------------------------------------------------------------

    @staticmethod
    def _steps(rows: Rows) -> tuple[Int[Tensor, "batch row"], Int[Tensor, "batch"]]:
        """The number of the token that each row chose (0: padding), and of the last one."""
        assert rows.prompt_length is not None
        step = torch.where(rows.valid, rows.position - rows.prompt_length[:, None] + 2, 0).clamp_min(0)
        return step, step.amax(1)

    def _blocks(
        self, rows: Rows, step: Int[Tensor, "batch row"], last: Int[Tensor, "batch"]
    ) -> Float[Tensor, "batch head row"]:
        """The ratios of the generation block that heads are compared by: at all steps, or at the last two (else NaN).

        Which of those two is the last step of the score is not known here: the row of the last generated token itself
        may have been read too, and then it is not a step.
        """
        if self.screen == "mean":
            return self._trace_of(self._block_tdo, rows, untraced=0)[self.block_name]
        # of the block itself: its rows are computed once for both
        compared = [self._prefix_tdo.start(StatisticPool(), self.leverage) for _ in range(2)]
        size = block_rows(rows.position.shape[0] * rows.n_head * rows.n_key, rows.position.device)
        for low in range(0, rows.n_query, size):
            some = slice(low, low + size)
            given = rows[some].generation_block(renormalize=self.block == "generation")
            for back, tdo in enumerate(compared):
                tdo.update(_masked(given, step[:, some] <= last[:, None] - back))
        ratios = [tdo.compute()[self._prefix_tdo.ratio_name] for tdo in compared]
        block = ratios[0].new_full((), torch.nan)  # of the block's own dtype: not every device has float64
        for back, ratio in enumerate(ratios):
            at_last = (step == last[:, None] - back) & rows.valid
            block = torch.where(at_last[:, None], ratio.unsqueeze(-1), block)
        return block

    def _candidates(
        self, block: Float[Tensor, "batch head row"], step: Int[Tensor, "batch row"], last: Int[Tensor, "batch"]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Sequences and a head of each to replay: that which the last step chooses, and that of the step before it.

        The head of a single token is told by the prefix itself, so that there all heads are replayed.
        """
        short = (last <= 2).nonzero().flatten()
        if len(short):
            for head in torch.arange(block.shape[1], device=block.device):
                yield short, head.expand(len(short))
        before, final = (self._choice(block, step, last - back) for back in (1, 0))
        for heads, wanted in ((final, last > 2), (before, (last > 2) & (before != final))):
            sequences = wanted.nonzero().flatten()
            if len(sequences):
                yield sequences, heads[sequences]

    def _choice(self, block: Tensor, step: Int[Tensor, "batch row"], last: Int[Tensor, "batch"]) -> Tensor:
        counted = step == last[:, None] if self.screen == "final" else (step >= 2) & (step <= last[:, None])
        counted = counted[:, None]
        mean = torch.where(counted, block, 0.0).sum(-1) / counted.sum(-1)
        return first_largest(mean, BLOCK_TIE)

    def _replay(
        self,
        prefix: Float[Tensor, "batch head row"],
        block: Float[Tensor, "batch head row"],
        sequences: Int[Tensor, "sequence"],
        heads: Int[Tensor, "sequence"],
    ) -> None:
        """Fill in the ratios of one head of each of some sequences, at every step."""
        kept = self._kept
        for some, chosen in zip(*(part.split(self._at_once(kept)) for part in (sequences, heads)), strict=True):
            rows = kept.rows_of_head(some, chosen)
            untraced = rows.n_query - prefix.shape[-1]
            # what others of the batch went on with is padding to these
            stop = max(untraced, int(rows.valid.any(0).nonzero().max()) + 1)
            values = self._trace_of(self._prefix_tdo, rows[:stop], untraced)[self._prefix_tdo.ratio_name]
            prefix[some, chosen, : stop - untraced] = values[:, 0]
            if self.screen == "final":
                values = self._trace_of(self._block_tdo, rows[untraced:stop], 0)[self.block_name]
                block[some, chosen, : stop - untraced] = values[:, 0].to(block.dtype)

    @staticmethod
    def _at_once(kept: _Kept) -> int:
        """How many sequences are replayed together."""
        return max(1, _GRAM_ENTRIES // kept.last.n_key**2)

    def _trace_of(self, tdo: TDO, rows: Rows, untraced: int) -> dict[str, Tensor]:
        fresh = tdo.start(StatisticPool(), self.leverage)
        tracer = Tracer([fresh], ROWS_PER_PASS if tdo is self._prefix_tdo else _BLOCK_ROWS_PER_PASS)
        feed(rows, [fresh], tracer, untraced)
        return tracer.values(rows.position.shape[0])[0]


def _masked(rows: Rows, keep: Bool[Tensor, "batch query"]) -> Rows:
    """The same rows of a pattern, some of them as padding."""
    return replace(
        rows,
        pattern=torch.where(keep[:, None, :, None], rows.pattern, 0.0),
        position=torch.where(keep, rows.position, -1),
    )


@dataclass
class _Kept:
    """What is kept of the rows: queries by chunk, keys as of the last one; or the analyzers that take patterns."""

    chunks: list[Rows] = field(default_factory=list)
    traced: int = 0  # how many of the last chunks are traced
    traced_serial: int | None = None
    tracer: Tracer | None = None
    analyzers: list[TDO] = field(default_factory=list)

    @property
    def last(self) -> Rows:
        return self.chunks[-1]

    def take(self, rows: Rows, *, traced: bool) -> None:
        if self.chunks:  # older keys are a part of the newer ones
            older = self.chunks[-1]
            bare = older.factors_or_raise.without_keys()
            self.chunks[-1] = replace(older, pattern=None, factors=bare)  # type: ignore[arg-type] # never asked for
        self.chunks.append(replace(rows, pattern=None, z=None, v=None, k=None))  # type: ignore[arg-type] # computed
        self.traced = self.traced + 1 if traced else 0

    def traced_rows(self) -> Rows:
        """The rows of every head since tracing began."""
        traced = [chunk.factors_or_raise for chunk in self.chunks[len(self.chunks) - self.traced :]]
        return self._rows(joined(traced), slice(None))

    def rows_of_head(self, sequences: Int[Tensor, "sequence"], heads: Int[Tensor, "sequence"]) -> Rows:
        """All rows of one head of some sequences, as a batch of one head."""
        parts = [chunk.factors_or_raise.heads(heads, sequences) for chunk in self.chunks]
        return self._rows(joined(parts), sequences)

    def _rows(self, factors: Factors, sequences: Tensor | slice) -> Rows:
        tokens, prompt = self.last.tokens, self.last.prompt_length
        return Rows(
            pattern=None,  # type: ignore[arg-type] # computed from the factors
            factors=factors,
            position=factors.position,
            first=factors.first,
            prompt_length=None if prompt is None else prompt[sequences],
            shortest_prompt=self.last.shortest_prompt,
            longest_generation=self.last.longest_generation,
            tokens=None if tokens is None else tokens[sequences],
        )
