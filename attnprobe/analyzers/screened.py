"""What an analyzer finds at one head a layer: the one whose generation block has the largest participation ratio."""

from __future__ import annotations

import copy

from jaxtyping import Float
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.analyzers.screened_rows import ScreenedRows, Screening, screened_name
from attnprobe.analyzers.tdo import TDO
from attnprobe.rows import Rows
from attnprobe.state.statistic import StatisticPool


class ScreenedTrace(Analyzer):
    """The trace of another analyzer at the heads that SAUQ reads, and the ratios that these are chosen by.

    Which head is chosen is known at the end. Where the host shows queries and keys, they are kept (O(n d) a head), and
    at the end the rows of the chosen head alone are computed again, one head of one layer at a time, so that nothing
    of O(n^2) is held for the heads that lose: they have NaN. Where the host makes patterns, all heads are followed as
    they come, and all have their values. Several of one site keep the rows once and share what they can.

    Results are traces only: those of the analyzer with `_screened` behind their names (and `_stride4`, where it has a
    stride of 4), and `participation_ratio_generation`.

    Args:
        analyzer: what to trace, from rows and tokens alone.
        measure: that heads are compared under, as in `TDO`.
        block: "generation" (rows renormalised) or "generation-raw".
        screen: heads are compared at the last step ("final") or by their mean over steps ("mean").

    Raises:
        ValueError: an analyzer that needs more than patterns, or an unknown option.

    >>> import attnprobe as ap
    >>> ap.ScreenedTrace(ap.SelfAttention()).variables["self_attention_screened"]["long_name"]
    'attention of a token to itself, at the head of the largest generation block'

    Source: [SG] arXiv 2610.06012, SAUQ.
    """

    only_traces = True

    def __init__(
        self, analyzer: Analyzer, measure: str = "intrinsic", *, block: str = "generation", screen: str = "final"
    ) -> None:
        super().__init__(trace=True)
        more = sorted(set(analyzer.needs) - {"pattern", "tokens"})
        if more:
            raise ValueError(
                f"{type(analyzer).__name__} needs {', '.join(more)}: rows that are computed again for the chosen head "
                "have patterns and tokens only."
            )
        if screen not in ("final", "mean"):
            raise ValueError(f"unknown screen {screen!r}: use 'final' or 'mean'.")
        self.analyzer = copy.copy(analyzer)
        self.analyzer.trace = True
        self.measure = measure
        self.block = block
        self.screen = screen
        self._compared = TDO(measure, scope=block, lambda2=False, trace=True)
        self.block_name = self._compared.ratio_name
        self.needs = (*dict.fromkeys((*analyzer.needs, *self._compared.needs)),)

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results."""
        described = {
            self.screened_name(name): {
                **about,
                "long_name": f"{about.get('long_name', name)}, at the head of the largest generation block",
                "stride": str(self.analyzer.stride),
            }
            for name, about in self.analyzer.variables.items()
        }
        return {**described, self.block_name: self._compared.variables[self.block_name]}

    def screened_name(self, name: str) -> str:
        """What a result of the analyzer is called here."""
        return screened_name(name, self.analyzer.stride)

    def start(self, pool: StatisticPool | None = None, leverage: Tensor | None = None) -> ScreenedTrace:
        fresh = super().start(pool, leverage)
        fresh._shared_rows()  # all that share rows are known before the first of them
        return fresh

    def merge(self, other: Analyzer) -> None:
        raise TypeError(
            f"{type(self).__name__} keeps rows in their order, so that of other rows cannot be merged into it."
        )

    def update(self, rows: Rows) -> None:
        self._shared_rows().update(rows)

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        """Nothing yet: see `late_trace`."""
        self._shared_rows().trace(rows)
        return {}

    def compute(self) -> dict[str, Tensor]:
        return {}

    def begin_generation(self) -> None:
        self._shared_rows().begin_generation()

    def late_trace(self) -> dict[str, Float[Tensor, "batch head row"]]:
        return self._shared_rows().values()

    def _shared_rows(self) -> ScreenedRows:
        """The rows of the site, shared with others of this class."""
        rows = self.use(ScreenedRows)
        rows.ask(Screening(self.analyzer, self._compared, self.screen == "mean", self.leverage))
        return rows


class ScreenedTDO(ScreenedTrace):
    """Participation ratios for SAUQ: of the prefix, at the chosen heads, and of the generation block.

    Results are traces only: `participation_ratio_screened`, of the prefix, and `participation_ratio_generation`.

    Args:
        measure: as in `TDO`.
        block, screen: as in `ScreenedTrace`.
        stride: the prefix ratio is computed at every stride-th step and held between; the block at every step.

    Source: [SG] arXiv 2610.06012, SAUQ.
    """

    def __init__(
        self, measure: str = "intrinsic", *, block: str = "generation", screen: str = "final", stride: int = 1
    ) -> None:
        tdo = TDO(measure, lambda2=False, trace=True, stride=stride)
        super().__init__(tdo, measure, block=block, screen=screen)
        self.prefix_name = self.screened_name(tdo.ratio_name)
