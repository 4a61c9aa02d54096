"""Tables of a report on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnprobe.text import visible

if TYPE_CHECKING:
    from attnprobe.bench.tables import Section


def print_sections(sections: Iterable[Section]) -> None:
    """Print each with its title above and its notes below."""
    # No line is cut in a pipe, where somebody may look for a number in it.
    out = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 10_000)
    for section in sections:
        out.print(Text(visible(section.title), style="bold"), soft_wrap=True)
        out.print(_table(section))
        for note in section.notes:
            out.print(Text(visible(note), style="dim"), soft_wrap=True)
        out.print()


def _table(section: Section) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(Text(visible(str(section.frame.index.name or ""))), overflow="fold")
    for column in section.frame.columns:
        table.add_column(Text(visible(str(column))), justify="right")
    for name, cells in section.frame.iterrows():
        table.add_row(Text(visible(str(name))), *(Text(visible(str(cell))) for cell in cells))
    return table
