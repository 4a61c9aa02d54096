"""What the command line prints: the answer, its uncertainty, a strip of coloured tokens and a table.

Text that a model wrote is untrusted: it is never read as markup, and characters that would steer a terminal
are spelt out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnprobe.text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from attnprobe.embedded import CachedModel

# Cividis, which reads the same with and without colour blindness: dark blue is doubt, yellow is confidence.
_RAMP = ("#00204d", "#31446b", "#666970", "#958f78", "#cbba69", "#ffea46")
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = ("probability", "entropy", "signal", "confidence")


def plain(value: Any) -> Any:
    """A value as strict JSON knows it: numbers of numpy and torch become Python's, NaN and infinity None.

    Example:
        >>> plain({"a": [1.5, float("nan")]})
        {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars too
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def record(score: Any) -> dict[str, Any]:
    """One answer as the object that `--json` prints: text, uncertainty by method, and a row a token."""
    return {
        "text": score.text,
        "uncertainty": plain(dict(score.uncertainty)),
        "tokens": plain(score.tokens.to_dict(orient="records")),
    }


def print_score(console: Console, score: Any, prompt: str | None = None) -> None:
    """Print one answer for people: its prompt if it is given, text, uncertainty, token strip and token table."""
    rows = score.tokens.to_dict(orient="records")
    measure = "confidence" if "confidence" in score.tokens.columns else "probability"
    if prompt is not None:
        console.rule(Text(_shorten(visible(prompt))), style="dim")
    answer = Text(visible(score.text, keep="\n\t")) if score.text else Text("(no text)", style="dim")
    console.print(answer, soft_wrap=True)
    console.print()
    for method, value in score.uncertainty.items():
        console.print(Text.assemble(("uncertainty ", "bold"), f"{visible(method)}  {_number(value)}"))
    if not rows:
        return
    if {"layer", "head"} <= set(rows[0]):
        console.print(Text(f"signal and confidence: layer {rows[0]['layer']}, head {rows[0]['head']}", style="dim"))
    console.print()
    monochrome = console.no_color or console.color_system is None
    top = _top(rows, measure)
    console.print(_strip(rows, measure, top, monochrome), soft_wrap=True)
    console.print(_legend(measure, top, monochrome))
    console.print()
    console.print(_token_table(rows, measure, top))


def models_table(models: Iterable[CachedModel]) -> Table:
    """The models in the cache folder: name, whether ready, size and place."""
    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    table.add_column("state")
    table.add_column("size", justify="right")
    table.add_column("folder", overflow="fold")
    for model in models:
        state = "ready" if model.complete else "unfinished"
        size = f"{model.size / 1e6:.0f} MB"
        table.add_row(Text(visible(model.name)), state, size, Text(visible(str(model.path))))
    return table


def _top(rows: Sequence[dict[str, Any]], measure: str) -> float:
    """Where the scale ends: a running confidence hardly passes alpha after its first step, so 1 would hide it."""
    values = [row.get(measure) for row in rows]
    if measure == "confidence":
        values = values[1:]
    return max((value for value in values if value is not None and 0 < value <= 1), default=1.0)


def _strip(rows: Sequence[dict[str, Any]], measure: str, top: float, monochrome: bool) -> Text:
    strip = Text()
    for row in rows:
        token, value = visible(str(row.get("token", ""))), _scaled(row.get(measure), top)
        # Without colour a small bar behind every token says the same.
        strip.append(token + _bar(value) if monochrome else token, style=_style(value))
    return strip


def _legend(measure: str, top: float, monochrome: bool) -> Text:
    legend = Text(f"{measure} after the first step: 0 " if measure == "confidence" else f"{measure}: 0 ", style="dim")
    if monochrome:
        return legend.append(f"{_BARS} {top:.2g}")
    for level in range(len(_RAMP)):
        legend.append("  ", style=Style(bgcolor=_RAMP[level], dim=False))
    return legend.append(f" {top:.2g}")


def _token_table(rows: Sequence[dict[str, Any]], measure: str, top: float) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("step", justify="right", style="dim")
    table.add_column("token", overflow="fold")
    shown = [column for column in _COLUMNS if column in rows[0]]
    for column in shown:
        table.add_column(column, justify="right")
    for index, row in enumerate(rows):
        token = Text(visible(str(row.get("token", ""))), style=_style(_scaled(row.get(measure), top)))
        table.add_row(str(row.get("step", index)), token, *(_number(row.get(column)) for column in shown))
    return table


def _scaled(value: Any, top: float) -> float | None:
    return None if value is None or not math.isfinite(value) else min(float(value) / top, 1.0)


def _level(value: Any, levels: int) -> int | None:
    """Which of so many levels a value between 0 and 1 falls into; None for no value."""
    if value is None or not math.isfinite(value):
        return None
    return min(levels - 1, max(0, int(value * levels)))


def _style(value: Any) -> Style:
    level = _level(value, len(_RAMP))
    if level is None:
        return Style.null()
    # Black on the light half and white on the dark half: a contrast of 5 to 1 or better throughout.
    return Style(color="#ffffff" if level <= 2 else "#000000", bgcolor=_RAMP[level])


def _bar(value: Any) -> str:
    level = _level(value, len(_BARS))
    return "" if level is None else _BARS[level]


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{float(value):.3f}"


def _shorten(text: str, limit: int = 60) -> str:
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
