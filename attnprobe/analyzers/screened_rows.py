"""Rows kept for the heads that the `ScreenedTrace`s of one site will choose at the end, and the traces of those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from attnprobe.state.statistic import Statistic, StatisticPool

# The generation block is float64, the prefix of the one-token case float32.
BLOCK_TIE, PREFIX_TIE = 1e-9, 1e-6
# Entries of the Gram matrices that are held at once while the chosen heads are replayed.
_GRAM_ENTRIES = 1 << 25
# Rows of the generation block that are traced together: its Gram matrix is small, so that passes cost little.
_BLOCK_ROWS_PER_PASS = 16


@dataclass(frozen=True, eq=False)
class Screening:
    """What one `ScreenedTrace` asks for.

    Attributes:
        analyzer: is traced at the chosen heads.
        block: traces the ratio of the generation block.
        by_mean: heads are compared by the mean over steps, not at the last one.
        leverage: of the unembedding, where there is one.
    """

    analyzer: Analyzer
    block: TDO
    by_mean: bool
    leverage: Tensor | None

    @property
    def key(self) -> tuple[str, str, bool]:
        """What tells one from another."""
        return repr(self.analyzer), self.block.ratio_name, self.by_mean


def screened_name(name: str, stride: int) -> str:
    """What a result of an analyzer is called where only chosen heads have one."""
    return f"{name}_screened" + (f"_stride{stride}" if stride > 1 else "")


class ScreenedRows(Statistic):
    """Rows of one site, and at the end the traces of the heads that are chosen.

    Where the host shows queries and keys they are kept, and rows are computed again at the end: those of the generation
    for all heads, all of them for the chosen heads. Screenings that choose the same head share its rows and what is
    summed over them. Where the host makes patterns, all heads are followed as they come.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[tuple[str, str, bool], Screening] = {}
        self._chunks: list[Rows] = []  # queries of each, keys as of the last
        self._traced = 0  # how many of the last chunks are traced
        self._followed: _Followed | None = None
        self._values: dict[str, Tensor] | None = None

    def ask(self, screening: Screening) -> None:
        """Let one more `ScreenedTrace` have what it needs. All are known before the first rows."""
        self._asked.setdefault(screening.key, screening)

    def begin_generation(self) -> None:
        """The prompt has grown: rows that were traced are a part of it now."""
        self._values = None
        self._traced = 0
        if self._followed is not None:
            self._followed = _Followed(list(self._asked.values()), self._followed)

    def trace(self, rows: Rows) -> None:
        """Take the next rows, with a value wanted at each."""
        if rows.serial != self._last_rows:
            self._take(rows, traced=True)
            self._last_rows = rows.serial

    def values(self) -> dict[str, Float[Tensor, "batch head row"]]:
        """By name, the values at every traced row; NaN for the heads that no one chose."""
        if self._values is None:
            self._values = self._computed()
        return self._values

    def _update(self, rows: Rows) -> None:
        self._take(rows, traced=False)

    def _merge(self, other: Statistic) -> None:
        raise TypeError("rows are kept in their order, so that other rows cannot be merged in.")

    def _take(self, rows: Rows, *, traced: bool) -> None:
        self._values = None
        grown = self._traced > 0 and not traced  # the prompt has
        self._traced = self._traced + 1 if traced else 0
        if rows.factors is None:
            if self._followed is None or grown:
                self._followed = _Followed(list(self._asked.values()), self._followed)
            self._followed.take(rows, traced=traced)
            return
        if self._chunks:  # older keys are a part of the newer ones
            older = self._chunks[-1]
            bare = older.factors_or_raise.without_keys()
            self._chunks[-1] = replace(older, pattern=None, factors=bare)  # type: ignore[arg-type] # never asked for
        self._chunks.append(replace(rows, pattern=None, z=None, v=None, k=None))  # type: ignore[arg-type] # computed

    def _computed(self) -> dict[str, Tensor]:
        if self._followed is not None:
            return self._followed.values()
        if not self._traced:
            return {}
        return _Replay(self._chunks, self._traced, list(self._asked.values())).values()


class _Followed:
    """The analyzers that take patterns as they come.

    Args:
        asked: what for.
        before: those of the generation before, where the prompt has grown: only generation blocks begin again.
    """

    def __init__(self, asked: Sequence[Screening], before: _Followed | None) -> None:
        if before is None:
            self._analyzers = {stride: _started(some) for stride, some in _by_stride(asked).items()}
        else:
            self._analyzers = before._analyzers
        self._blocks = _started([(one.block, one.leverage) for one in _by_block(asked)])
        self._tracers = {stride: Tracer(some) for stride, some in self._analyzers.items()}
        self._block_tracer = Tracer(self._blocks)

    def take(self, rows: Rows, *, traced: bool) -> None:
        untraced = 0 if traced else rows.n_query
        for stride, some in self._analyzers.items():
            feed(rows, some, self._tracers[stride], untraced)
        feed(rows, self._blocks, self._block_tracer, untraced)

    def values(self) -> dict[str, Tensor]:
        found = {
            screened_name(name, stride): value
            for stride, tracer in self._tracers.items()
            for name, value in tracer.values(0)[0].items()
        }
        return found | self._block_tracer.values(0)[0]


class _Replay:
    """Ratios from kept queries and keys.

    Args:
        chunks: all rows, the last `traced` of them traced.
        asked: what for.
    """

    def __init__(self, chunks: Sequence[Rows], traced: int, asked: Sequence[Screening]) -> None:
        self._chunks = chunks
        self._asked = asked
        generated = [chunk.factors_or_raise for chunk in chunks[len(chunks) - traced :]]
        self._rows = self._of(joined(generated), slice(None))
        # the number of the token that each row chose (0: padding), and of the last one
        assert self._rows.prompt_length is not None
        chose = self._rows.position - self._rows.prompt_length[:, None] + 2
        self._step: Int[Tensor, "batch row"] = torch.where(self._rows.valid, chose, 0).clamp_min(0)
        self._last: Int[Tensor, "batch"] = self._step.amax(1)
        self._complete = {one.block.ratio_name for one in asked if one.by_mean}

    def values(self) -> dict[str, Float[Tensor, "batch head row"]]:
        """Values for the chosen heads, and ratios of the generation block for those that they were chosen by."""
        blocks = self._compared() | self._everywhere()
        found = dict(blocks)
        # a head that one has chosen is replayed for all: most of the work is in its rows and their products
        wanted = torch.stack([self._wanted(one, blocks[one.block.ratio_name]) for one in self._asked]).any(0)
        sequences, heads = wanted.nonzero().unbind(1)
        size = max(1, _GRAM_ENTRIES // self._rows.n_key**2)
        for pairs in zip(sequences.split(size), heads.split(size), strict=True):
            self._replay(found, *pairs)
        return found

    # -- generation blocks of all heads -----------------------------------------------------------------------

    def _compared(self) -> dict[str, Float[Tensor, "batch head row"]]:
        """The ratios of the generation block that heads are compared by: at the last two steps, NaN at others.

        Which of those two is the last step of the score is not known here: the row of the last generated token itself
        may have been read too, and then it is not a step.
        """
        rows = self._rows
        blocks: dict[str, Tensor] = {}
        for renormalize in (True, False):
            asked = [
                one
                for one in _by_block(self._asked)
                if (one.block.scope == "generation") == renormalize and one.block.ratio_name not in self._complete
            ]
            if not asked:
                continue
            # the blocks themselves are computed once for both steps and all measures
            pools = [StatisticPool() for _ in range(2)]
            compared = [[_over_all(one.block).start(pool, one.leverage) for one in asked] for pool in pools]
            size = block_rows(rows.position.shape[0] * rows.n_head * rows.n_key, rows.position.device)
            for low in range(0, rows.n_query, size):
                some = slice(low, low + size)
                block = rows[some].generation_block(renormalize=renormalize)
                for back, tdos in enumerate(compared):
                    given = _masked(block, self._step[:, some] <= self._last[:, None] - back)
                    for tdo in tdos:
                        tdo.update(given)
            for i, one in enumerate(asked):
                blocks[one.block.ratio_name] = self._at_last([tdos[i] for tdos in compared])
        return blocks

    def _at_last(self, tdos: Sequence[TDO]) -> Float[Tensor, "batch head row"]:
        """The value of each at the last step, the step before it, ..., NaN elsewhere."""
        ratios = [tdo.compute()[tdo.ratio_name] for tdo in tdos]
        block = ratios[0].new_full((), torch.nan)  # of the block's own dtype: not every device has float64
        for back, ratio in enumerate(ratios):
            there = (self._step == self._last[:, None] - back) & self._rows.valid
            block = torch.where(there[:, None], ratio.unsqueeze(-1), block)
        return block

    def _everywhere(self) -> dict[str, Float[Tensor, "batch head row"]]:
        """The ratios of the generation block at all steps, where heads are compared by their mean."""
        asked = [one for one in _by_block(self._asked) if one.block.ratio_name in self._complete]
        return _traced([(one.block, one.leverage) for one in asked], self._rows, _BLOCK_ROWS_PER_PASS) if asked else {}

    # -- the chosen heads ---------------------------------------------------------------------------------------

    def _wanted(self, one: Screening, block: Float[Tensor, "batch head row"]) -> Bool[Tensor, "batch head"]:
        """The heads to replay: that which the last step chooses, and that of the step before it.

        The head of a single token is told by the prefix itself, so that there all heads are replayed.
        """
        head = torch.arange(block.shape[1], device=block.device)
        wanted = torch.zeros(block.shape[:2], dtype=torch.bool, device=block.device)
        for back in (0, 1):
            wanted |= head == self._choice(one, block, self._last - back)[:, None]
        return wanted | (self._last <= 2)[:, None]

    def _choice(self, one: Screening, block: Tensor, last: Int[Tensor, "batch"]) -> Int[Tensor, "batch"]:
        step = self._step
        counted = (step >= 2) & (step <= last[:, None]) if one.by_mean else step == last[:, None]
        counted = counted[:, None]
        mean = torch.where(counted, block, 0.0).sum(-1) / counted.sum(-1)
        return first_largest(mean, BLOCK_TIE)

    def _replay(
        self,
        found: dict[str, Float[Tensor, "batch head row"]],
        sequences: Int[Tensor, "pair"],
        heads: Int[Tensor, "pair"],
    ) -> None:
        """Fill in the values of some heads, one of one sequence each, at every step."""
        rows = self._of_heads(sequences, heads)
        n_before = rows.n_query - self._rows.n_query
        # what others of the batch went on with is padding to these
        stop = max(n_before, int(rows.valid.any(0).nonzero().max()) + 1)
        before, generated = rows[:n_before] if n_before else None, rows[n_before:stop]
        values: dict[str, Tensor] = {}
        for stride, some in _by_stride(self._asked).items():
            traced = _traced(some, generated, ROWS_PER_PASS, before)
            values |= {screened_name(name, stride): value for name, value in traced.items()}
        partial = [one for one in _by_block(self._asked) if one.block.ratio_name not in self._complete]
        if partial:
            values |= _traced([(one.block, one.leverage) for one in partial], generated, _BLOCK_ROWS_PER_PASS)
        for name, value in values.items():
            if name not in found:
                everyone = (*self._rows.position.shape[:1], self._rows.n_head, self._rows.n_query)
                found[name] = value.new_full(everyone, torch.nan)
            found[name][sequences, heads, : stop - n_before] = value[:, 0].to(found[name].dtype)

    def _of_heads(self, sequences: Int[Tensor, "pair"], heads: Int[Tensor, "pair"]) -> Rows:
        """All rows of one head of some sequences, as a batch of one head."""
        parts = [chunk.factors_or_raise.heads(heads, sequences) for chunk in self._chunks]
        return self._of(joined(parts), sequences)

    def _of(self, factors: Factors, sequences: Tensor | slice) -> Rows:
        last = self._chunks[-1]
        return Rows(
            pattern=None,  # type: ignore[arg-type] # computed from the factors
            factors=factors,
            position=factors.position,
            first=factors.first,
            prompt_length=None if last.prompt_length is None else last.prompt_length[sequences],
            shortest_prompt=last.shortest_prompt,
            longest_generation=last.longest_generation,
            tokens=None if last.tokens is None else last.tokens[sequences],
        )


def _by_block(asked: Sequence[Screening]) -> list[Screening]:
    """One for each generation block ratio."""
    return list({one.block.ratio_name: one for one in asked}.values())


def _over_all(tdo: TDO) -> TDO:
    """The same over whole rows."""
    return TDO(tdo.measure, lambda2=False)


def _by_stride(asked: Sequence[Screening]) -> dict[int, list[tuple[Analyzer, Tensor | None]]]:
    """The analyzers to trace, each once, by their stride: those of one stride can share what they sum."""
    by_stride: dict[int, dict[str, tuple[Analyzer, Tensor | None]]] = {}
    for one in asked:
        some = by_stride.setdefault(one.analyzer.stride, {})
        some[repr(one.analyzer)] = (one.analyzer, one.leverage)
    return {stride: list(some.values()) for stride, some in by_stride.items()}


def _started(analyzers: Sequence[tuple[Analyzer, Tensor | None]]) -> list[Analyzer]:
    """Fresh analyzers on statistics that they share."""
    pool = StatisticPool()
    return [analyzer.start(pool, leverage) for analyzer, leverage in analyzers]


def _traced(
    analyzers: Sequence[tuple[Analyzer, Tensor | None]], rows: Rows, rows_per_pass: int, before: Rows | None = None
) -> dict[str, Float[Tensor, "batch head row"]]:
    """The values at every one of the rows, by name."""
    started = _started(analyzers)
    tracer = Tracer(started, rows_per_pass)
    if before is not None:
        feed(before, started, tracer, before.n_query)
    tracer.take(rows, started)
    return tracer.values(rows.position.shape[0])[0]


def _masked(rows: Rows, keep: Bool[Tensor, "batch query"]) -> Rows:
    """The same rows of a pattern, some of them as padding."""
    return replace(
        rows,
        pattern=torch.where(keep[:, None, :, None], rows.pattern, 0.0),
        position=torch.where(keep, rows.position, -1),
    )
