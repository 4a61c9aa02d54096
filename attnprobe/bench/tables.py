"""Tables of text, and how Markdown and LaTeX write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnprobe.text import visible

if TYPE_CHECKING:
    import pandas as pd

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|&~$])")
_NEGATIVE = re.compile(r"(?<![\w.])-(?=[\d.])")


@dataclass(frozen=True, eq=False)
class Section:
    """One table of a report.

    Attributes:
        title: what it shows.
        frame: its cells as text; the index names the rows.
        notes: sentences below it.
    """

    title: str
    frame: pd.DataFrame
    notes: Sequence[str] = ()


def markdown(section: Section) -> str:
    r"""A heading, a pipe table and the notes.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"a|b": ["0.5"]}, index=pd.Index(["S_1"], name="method"))
    >>> print(markdown(Section("Title", frame)))
    ### Title
    <BLANKLINE>
    | method | a\|b |
    |---|---:|
    | S\_1 | 0.5 |
    <BLANKLINE>
    """
    lines = [f"### {_in_markdown(section.title)}", ""]
    head, *body = _rows(section, _in_markdown)
    lines += [_piped(head), "|---|" + "---:|" * (len(head) - 1), *map(_piped, body), ""]
    for note in section.notes:
        lines += [_in_markdown(note), ""]
    return "\n".join(lines)


def latex(section: Section) -> str:
    r"""A floating table with booktabs rules and the title as caption.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"R&D": ["-0.5"]}, index=pd.Index(["S_1"], name="method"))
    >>> print(latex(Section("Title", frame)))
    \begin{table}
    \caption{Title}
    \begin{tabular}{lr}
    \toprule
    method & R\&D \\
    \midrule
    S\_1 & $-$0.5 \\
    \bottomrule
    \end{tabular}
    \end{table}
    <BLANKLINE>
    """
    head, *body = ([_signed(cell) for cell in row] for row in _rows(section, _in_latex))
    notes = [f"\n\\smallskip\n{_in_latex(note)}" for note in section.notes]
    lines = [
        r"\begin{table}",
        rf"\caption{{{_in_latex(section.title)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in body),
        r"\bottomrule",
        r"\end{tabular}",
        *notes,
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def _rows(section: Section, escape: Callable[[str], str]) -> list[list[str]]:
    frame = section.frame
    head = [str(frame.index.name or ""), *map(str, frame.columns)]
    body = [[str(name), *map(str, cells)] for name, cells in zip(frame.index, frame.to_numpy(), strict=True)]
    return [[escape(cell) for cell in row] for row in [head, *body]]


def _piped(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def _in_markdown(text: str) -> str:
    # An interval is no link: there is nothing in round brackets after it.
    shown = visible(text)
    return shown if _is_numbers(shown) else _MARKDOWN.sub(r"\\\1", shown)


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in visible(text))


def _signed(cell: str) -> str:
    return _NEGATIVE.sub("$-$", cell) if _is_numbers(cell) else cell


def _is_numbers(text: str) -> bool:
    return re.fullmatch(r"[-+\d.,\[\] e]*", text) is not None
