"""Tables of the results for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Figures
from benchmarks.scaling import Growth
from benchmarks.synchronisation import EVENTS, added


def print_machine(console: Console, facts: dict[str, Any]) -> None:
    """One line on where this runs."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    card = f", {facts['card']}" if facts["card"] else ""
    console.print(f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} thread(s){card}; {versions}")


_CAPTION = (
    "ratio: to the bare host of the same round, median, and its range over rounds; own: total over total less the "
    "probe's own calls; MB: peak above bare; state: MB that the analyzers hold"
)


def print_figures(console: Console, figures: Sequence[Figures]) -> None:
    """One workload: a row a variant, and below what could not run or gave other tokens."""
    table = Table(title=figures[0].workload.label, title_justify="left", caption=_CAPTION, caption_justify="left")
    table.add_column("variant", no_wrap=True)
    for column in ("seconds", "ratio", "rounds", "own", "MB", "state"):
        table.add_column(column, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(figure.variant, *_cells(figure))
    console.print(table)
    for figure in figures:
        if figure.status != "ok":
            console.print(f"{figure.variant}: {figure.status}: {figure.reason}", markup=False)
        elif figure.same_tokens is False:
            console.print(f"{figure.variant}: as many tokens as the bare host, but not the same ones")


def _cells(figure: Figures) -> list[str]:
    if figure.status != "ok":
        return [figure.status]
    row = figure.as_json()
    seconds, ratio, own = row["seconds"], row["ratio"], row["own_ratio"]
    return [
        f"{seconds['median']:.2f}" if seconds else "",
        f"{ratio['median']:.3f}" if ratio else "",
        f"{ratio['min']:.2f}-{ratio['max']:.2f}" if ratio else "",
        f"{own['median']:.3f}" if own else "",
        "" if figure.peak_mb_above is None else f"{figure.peak_mb_above:.0f}",
        "" if figure.state_bytes is None else f"{figure.state_bytes / 1e6:.2f}",
    ]


_GROWING = {
    "seconds": ("seconds above bare", 1.0),
    "peak_mb": ("peak MB above bare", 1.0),
    "state_bytes": ("MB that the analyzers hold", 1e6),
}


def print_growth(console: Console, grown: Sequence[Growth]) -> None:
    """The exponents of n, beside the figures they were fitted to."""
    for host in dict.fromkeys(one.host for one in grown):
        here = [one for one in grown if one.host == host]
        for figure, (title, unit) in _GROWING.items():
            if any(value is not None for one in here for value in getattr(one, figure)):
                console.print(_growth_table(here, figure, f"{host}: {title}, by tokens in all", unit))


def _growth_table(grown: Sequence[Growth], figure: str, title: str, unit: float) -> Table:
    table = Table(title=f"{title} (-: not above noise)", title_justify="left")
    table.add_column("alone", no_wrap=True)
    for column in ("slope", "at the end", *map(str, grown[0].n)):
        table.add_column(column, justify="right")
    for one in grown:
        slopes = (one.slopes()[figure], one.slopes(last=3)[figure])
        values = [None if value is None else value / unit for value in getattr(one, figure)]
        table.add_row(one.variant, *("-" if y is None else f"{y:.2f}" for y in slopes), *map(_short, values))
    return table


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def print_waits(console: Console, host: str, waits: dict[str, dict[str, float]]) -> None:
    """What a decode step waits for, bare and under a probe."""
    seen = [event for event in EVENTS if any(counts[event] for counts in waits.values())]
    table = Table(title=f"{host}: waits of one decode step, and those the probe adds", title_justify="left")
    table.add_column("watching", no_wrap=True)
    for event in seen:
        table.add_column(event.removeprefix("aten::"), justify="right")
    extra = added(waits)
    for name, counts in waits.items():
        more = extra.get(name, {})
        table.add_row(name, *(f"{counts[e]:.2f}" + (f" ({more[e]:+.2f})" if more else "") for e in seen))
    console.print(table)
