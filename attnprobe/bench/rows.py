"""One row under our own names, and what is said where it lacks something."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnprobe.bench.config import TaskConfig
from attnprobe.bench.data import Table


@dataclass(frozen=True)
class Row:
    """A row of a table, read by a task's names.

    Attributes:
        table: where it is.
        index: which one, from 0.
        task: whose names they are.
        values: the row as it was found.
    """

    table: Table
    index: int
    task: TaskConfig
    values: Mapping[str, Any]

    @classmethod
    def at(cls, table: Table, index: int, task: TaskConfig) -> Row:
        """Row `index` of a table; taken out once, as a data set of the hub decodes a row every time."""
        return cls(table, index, task, table.rows[index])

    @property
    def id(self) -> str:
        """The id that the row has, or its number where it has none."""
        value = _as_text(self.get("id"))
        return str(self.index + 1) if value is None or not value.strip() else value

    def get(self, name: str) -> Any:
        """What the row has for `name`, None where it has nothing."""
        for column in self.task.columns(name):
            value = _reach(self.values, column)
            if value is not None:
                return value
        return None

    def text(self, name: str) -> str:
        """A text that has to be there.

        Raises:
            ValueError: it is not, or is no text.
        """
        value = self.get(name)
        if value is None:
            raise self.lacks(name)
        text = _as_text(value)
        if text is None:
            raise self.wrong(name, f"is a {type(value).__name__} where a text should be")
        return self._unicode(name, text)

    def optional_text(self, name: str) -> str | None:
        """A text, or None where there is none."""
        text = _as_text(self.get(name))
        return None if text is None else self._unicode(name, text)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts that has to be there; a single text is a list of one.

        Raises:
            ValueError: it is not, or holds something else.
        """
        value = self.get(name)
        if value is None:
            raise self.lacks(name)
        listed = self._list(value)
        found = tuple(_as_text(item) for item in listed)
        texts = tuple(text for text in found if text is not None)
        if len(texts) != len(found):
            raise self.wrong(name, "holds something that is no text")
        return tuple(self._unicode(name, text) for text in texts)

    def lacks(self, name: str) -> ValueError:
        """The error of a row without `name`."""
        columns = self.task.columns(name)
        wanted = " or ".join(repr(column) for column in columns)
        # In one line and cut: a file may have hundreds of columns.
        has = textwrap.shorten(", ".join(sorted(map(str, self.values))), 300, placeholder=" ...")
        return self.wrong(
            name,
            f"is missing: it should be in the column {wanted}, and the row has {has}; `fields` maps names to columns",
        )

    def wrong(self, name: str, what: str) -> ValueError:
        """The error of a row whose `name` is no good."""
        return ValueError(f"row {self.index + 1} of {self.table.name} (id {self.id!r}): {name} {what}")

    def _list(self, value: Any) -> list[Any]:
        if isinstance(value, list | tuple):
            return list(value)
        if self.table.text_only and isinstance(value, str) and value.lstrip().startswith("["):
            try:
                parsed = json.loads(value)
            except (ValueError, RecursionError):
                return [value]  # a text that begins with a bracket
            return list(parsed)
        return [value]

    def _unicode(self, name: str, text: str) -> str:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise self.wrong(name, "holds half a character, which no tokenizer can read") from None
        return text


def _reach(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or what dots in its name reach inside one."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _as_text(value: Any) -> str | None:
    """Text as it is and numbers as they are written; None for anything else, NaN included."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return str(value)
