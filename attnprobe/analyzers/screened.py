"""Participation ratios of the prefix for one head a layer: the one whose generation block has the largest."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.analyzers.screened_rows import ScreenedRows, Screening
from attnprobe.analyzers.tdo import TDO
from attnprobe.rows import Rows
from attnprobe.state.statistic import StatisticPool


class ScreenedTDO(Analyzer):
    """Traces for SAUQ: participation ratio of the generation block of every head, and of the prefix of the chosen one.

    Which head is chosen is known at the end. Where the host shows queries and keys, they are kept (O(n d) a head), and
    at the end the rows of the chosen head alone are computed again, one head of one layer at a time, so that nothing
    of O(n^2) is held for the heads that lose. Their ratios are NaN, but for those that heads are compared by. Where the
    host makes patterns, all heads are followed as they come, and all have their ratios. Several of one site, of other
    measures or screens, keep the rows once and share what they can.

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
        self.prefix_stride = Analyzer(stride=stride).stride
        self._block_tdo = TDO(measure, scope=block, lambda2=False, trace=True)
        self._prefix_tdo = TDO(measure, lambda2=False, trace=True, stride=stride)
        # not the name of `TDO`: a head that was not chosen has no value here
        options = [block.removeprefix("generation-")] if block != "generation" else []
        options += ([] if screen == "final" else [screen]) + ([] if stride == 1 else [f"stride{stride}"])
        self.prefix_name = "_".join([self._prefix_tdo.ratio_name, "screened", *options])
        self._prefix_tdo.ratio_name = self.prefix_name
        self.block_name = self._block_tdo.ratio_name
        self.needs = self._prefix_tdo.needs

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results."""
        prefix = self._prefix_tdo.variables[self.prefix_name]
        described = {
            **prefix,
            "long_name": f"{prefix['long_name']}, of the chosen head",
            "stride": str(self.prefix_stride),
        }
        return {self.prefix_name: described, **self._block_tdo.variables}

    def start(self, pool: StatisticPool | None = None, leverage: Tensor | None = None) -> ScreenedTDO:
        fresh = super().start(pool, leverage)
        fresh._rows  # noqa: B018 # all that share rows are known before the first of them
        return fresh

    def merge(self, other: Analyzer) -> None:
        raise TypeError("ScreenedTDO keeps rows in their order, so that of other rows cannot be merged into it.")

    def update(self, rows: Rows) -> None:
        self._rows.update(rows)

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        """Nothing yet: see `late_trace`."""
        self._rows.trace(rows)
        return {}

    def compute(self) -> dict[str, Tensor]:
        return {}

    def late_trace(self) -> dict[str, Float[Tensor, "batch head row"]]:
        values = self._rows.values()
        return {name: values[name] for name in (self.prefix_name, self.block_name) if name in values}

    @property
    def _rows(self) -> ScreenedRows:
        """The rows of the site, shared with others of this class."""
        rows = self.use(ScreenedRows)
        rows.ask(Screening(self._prefix_tdo, self._block_tdo, self.screen == "mean", self.leverage))
        return rows
