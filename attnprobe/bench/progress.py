"""A bar a task while a run is on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from attnprobe.text import visible


class Bars:
    """Rows done, rows a second and the time left of every task, on standard error; silent where nobody looks.

    Args:
        totals: task label -> its number of rows.
        done: task label -> how many of them are there already.
        show: False for silence; even then, and in a pipe, everything else works.
    """

    def __init__(self, totals: Mapping[str, int], done: Mapping[str, int], show: bool = True) -> None:
        self._totals, self._done = totals, done
        self._progress = _progress() if show and sys.stderr is not None and sys.stderr.isatty() else None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        if self._progress is not None:
            self._progress.start()
            for label, total in self._totals.items():
                task = self._progress.add_task(visible(label), total=total, completed=self._done.get(label, 0))
                self._tasks[label] = task
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, label: str, rows: int) -> None:
        """So many rows of a task are done and stored."""
        if self._progress is not None:
            self._progress.advance(self._tasks[label], rows)


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text("" if task.speed is None else f"{task.speed:.1f} rows/s", style="progress.data.speed")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Speed(),
        TimeRemainingColumn(),
    )
    # Batches take seconds to minutes: a speed needs several of them.
    return Progress(*columns, speed_estimate_period=600, console=Console(stderr=True, markup=False, highlight=False))
