"""Labelled answers: rows of a data set as prompts, answers and labels."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnprobe.bench.data import Table
from attnprobe.bench.prompts import Template
from attnprobe.polarity.recipes import Recipe
from attnprobe.polarity.sources import Source

_TRUE, _FALSE = ("1", "true", "yes", "hallucinated"), ("0", "false", "no", "right")


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer that somebody has judged.

    Attributes:
        id: of the answer; no two of a data set have the same.
        group: the question that it answers; answers of one question belong together wherever rows are drawn.
        prompt, answer: text; between them stands a space.
        label: 1 if the answer is hallucinated or unfaithful, 0 if it is right.
    """

    id: str
    group: str
    prompt: str
    answer: str
    label: int


def answers_of(source: Source) -> list[LabelledAnswer]:
    """All labelled answers of a source, in its order.

    Raises:
        ValueError: a row that lacks something, an id that is there twice, or answers of one label alone.
    """
    table = source.table()
    found = [answer for index in range(len(table.rows)) for answer in _answers_of_row(table, index, source.recipe)]
    seen: set[str] = set()
    for answer in found:
        if answer.id in seen:
            raise ValueError(f"{table.name} has two answers with the id {answer.id!r}: they are told apart by it")
        seen.add(answer.id)
    if len({answer.label for answer in found}) < 2:
        raise ValueError(f"all {len(found)} answers of {table.name} have the label {found[0].label}: both are needed")
    return found


def chosen(answers: Sequence[LabelledAnswer], rows: int | None, seed: int) -> list[LabelledAnswer]:
    """The answers of at most `rows` questions, drawn by seed; those of fewer questions are among those of more.

    >>> two = [LabelledAnswer("a", "1", "", "x", 0), LabelledAnswer("b", "2", "", "y", 1)]
    >>> len(chosen(two, 1, seed=0)), len(chosen(two, None, seed=0))
    (1, 2)
    """
    groups = list(dict.fromkeys(answer.group for answer in answers))
    random.Random(seed).shuffle(groups)
    kept = set(groups[:rows])
    return [answer for answer in answers if answer.group in kept]


def content_hash(answers: Sequence[LabelledAnswer]) -> str:
    """What tells two sets of answers apart, wherever their file lies."""
    said = json.dumps([[a.id, a.group, a.prompt, a.answer, a.label] for a in answers])
    return hashlib.sha256(said.encode()).hexdigest()


def _answers_of_row(table: Table, index: int, recipe: Recipe) -> Iterator[LabelledAnswer]:
    values: Mapping[str, Any] = table.rows[index]
    if recipe.prepare is not None:
        values = recipe.prepare(values)
    row = _Reader(table, index, recipe, values)
    identity = row.optional("id") or str(index + 1)
    group = row.optional("group") or identity
    prompt = Template(recipe.template).fill({name: row.text(name) for name in Template(recipe.template).names})
    if row.has("right"):
        right = row.texts("right")
        wrong = [text for text in row.texts("hallucinated") if text not in right]
        if not wrong:
            raise row.wrong("hallucinated", "has nothing that is not among the right answers")
        for label, kind, texts in ((0, "right", right), (1, "hallucinated", wrong)):
            for number, text in enumerate(texts, 1):
                name = f"{identity}:{kind}" + (f"-{number}" if len(texts) > 1 else "")
                yield LabelledAnswer(name, group, prompt, text, label)
        return
    yield LabelledAnswer(identity, group, prompt, row.text("answer"), row.label())


@dataclass(frozen=True)
class _Reader:
    """One row under our names, and what is said where it lacks something."""

    table: Table
    index: int
    recipe: Recipe
    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        for column in self.recipe.columns_of(name):
            value: Any = self.values
            for part in [column] if column in self.values else column.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def optional(self, name: str) -> str | None:
        value = self.get(name)
        return None if value is None or not str(value).strip() else str(value)

    def text(self, name: str) -> str:
        value = self._needed(name)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(
                name, f"is {'blank' if isinstance(value, str) else type(value).__name__}, and must be text"
            )
        return self._clean(name, value)

    def texts(self, name: str) -> list[str]:
        value = self._needed(name)
        if isinstance(value, str) and self.table.text_only and value.lstrip().startswith("["):
            with contextlib.suppress(ValueError):  # a text that begins with a bracket
                value = json.loads(value)
        listed = value if isinstance(value, list | tuple) else [value]
        texts = list(dict.fromkeys(text.strip() for text in listed if isinstance(text, str) and text.strip()))
        if not texts or not all(isinstance(text, str) for text in listed):
            raise self.wrong(name, "has no text that is not blank, or something that is no text")
        return [self._clean(name, text) for text in texts]

    def label(self) -> int:
        value = self._needed("label")
        said = str(int(value) if isinstance(value, float) and value in (0, 1) else value).strip().lower()
        if said not in (*_TRUE, *_FALSE):
            raise self.wrong("label", f"is {said[:40]!r}: use 1, true or yes (hallucinated), or 0, false or no")
        return int(said in _TRUE)

    def wrong(self, name: str, what: str) -> ValueError:
        return ValueError(f"row {self.index + 1} of {self.table.name}: {name} {what}")

    def _needed(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            columns = self.recipe.columns_of(name) or (name,)
            has = ", ".join(map(str, self.values))[:200]
            raise self.wrong(
                name,
                f"is missing: it should be in the column {' or '.join(map(repr, columns))}, and the row has {has}; "
                "a YAML file with `fields` maps names to columns",
            )
        return value

    def _clean(self, name: str, text: str) -> str:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise self.wrong(name, "holds half a character, which no tokenizer can read") from None
        return text.strip() if name != "prompt" else text
