"""Rows as items: what is asked and what would be right, before it becomes a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any

from attnprobe.bench.config import ROW_NAMES, TaskConfig
from attnprobe.bench.data import Table
from attnprobe.bench.prompts import Template, lettered
from attnprobe.bench.rows import Row

_SOURCES = ("context", "document", "dialogue", "story")
_LISTS = ("id", "references", "choices", "questions", "answers")


@dataclass(frozen=True)
class Item:
    """One question of a task.

    Attributes:
        id: of its row, with the turn where a row has many; not yet told apart from another of the same name.
        texts: what the templates put in, under our names.
        fields: the same for those who measure quality: choices as a tuple rather than as lines.
        references: accepted answers, at least one.
        answer: what a few-shot example says.
        subject: few-shot examples come from the same one; "" where the task has no subjects.
        turns: what was asked and answered before, in a conversation.
    """

    id: str
    texts: Mapping[str, str]
    fields: Mapping[str, Any]
    references: tuple[str, ...]
    answer: str
    subject: str = ""
    turns: tuple[tuple[str, str], ...] = field(default=())

    @property
    def source(self) -> str:
        """The text that an answer has to be true to."""
        return next((self.texts[name] for name in _SOURCES if name in self.texts), "")


def by_subject(task: TaskConfig) -> bool:
    """Whether few-shot examples have to be of the same subject: the prompt names it."""
    return "subject" in used_names(task)


def used_names(task: TaskConfig) -> set[str]:
    """The names that the templates of a task put in, but for the answer."""
    return {*Template(task.template).names, *Template(task.preamble).names} - {"answer"}


def items_of(table: Table, task: TaskConfig) -> list[Item]:
    """All items of a table, in its order.

    Raises:
        ValueError: a row that lacks something; the sentence names it.
    """
    return [item for index in range(len(table.rows)) for item in items_of_row(Row.at(table, index, task))]


def items_of_row(row: Row) -> Iterator[Item]:
    """The items of one row: one, or one for every turn of a conversation.

    Raises:
        ValueError: the row lacks something.
    """
    yield from _turns(row) if row.task.conversation else [_single(row)]


def _single(row: Row) -> Item:
    task = row.task
    used = used_names(task)
    texts = {name: row.text(name) for name in sorted(used - {"choices"})}
    for name in (*ROW_NAMES, *task.fields):
        if name not in (*texts, *_LISTS):
            text = row.optional_text(name)
            if text is not None:
                texts[name] = text
    _strip_question(texts)
    fields: dict[str, Any] = dict(texts)
    if "choices" in used:
        choices = row.texts("choices")
        letter = _letter(row, len(choices))
        texts["choices"] = lettered(choices)
        fields |= {"choices": choices, "answer": letter}
        references: tuple[str, ...] = (letter,)
        answer = letter
    else:
        references = _references(row)
        answer = texts.get("answer", "").strip() or references[0]
    subject = texts["subject"] if by_subject(task) else ""
    if subject:
        texts["subject"] = subject.replace("_", " ")  # "abstract_algebra" is a name of files
    item = Item(row.id, texts, fields, references, answer, subject)
    _check_source_text(row, item)
    return item


def _turns(row: Row) -> Iterator[Item]:
    task = row.task
    questions, answers = row.texts("questions"), row.texts("answers")
    if len(questions) != len(answers):
        raise row.wrong("questions", f"has {len(questions)} turns and answers has {len(answers)}")
    if not questions:
        raise row.wrong("questions", "is empty")
    shared = {name: row.text(name) for name in sorted(used_names(task) - {"question"})}
    for turn, (question, answer) in enumerate(zip(questions, answers, strict=True), 1):
        if not answer.strip():
            raise row.wrong("answers", f"has nothing for turn {turn}")
        texts = {**shared, "question": question}
        _strip_question(texts)
        before = tuple(zip(questions[: turn - 1], answers[: turn - 1], strict=True))
        item = Item(f"{row.id}-{turn}", texts, {**texts, "turn": turn}, (answer,), answer, turns=before)
        _check_source_text(row, item)
        yield item


def _references(row: Row) -> tuple[str, ...]:
    name = "answer" if row.get("references") is None and row.get("answer") is not None else "references"
    texts = tuple(text for text in row.texts(name) if text.strip())
    if not texts:
        raise row.wrong(name, "has no answer that is not blank")
    return texts


def _letter(row: Row, n_choices: int) -> str:
    """The letter of the right choice, which data sets write as a letter or as its number from 0."""
    if not 2 <= n_choices <= len(ascii_uppercase):
        raise row.wrong("choices", f"has {n_choices} of them: use 2 to {len(ascii_uppercase)}")
    said = row.text("answer").strip()
    if said.isdecimal() and len(said) < 3:
        number = int(said)
    else:
        number = ascii_uppercase.find(said.upper()) if len(said) == 1 else -1
    if not 0 <= number < n_choices:
        raise row.wrong("answer", f"is {said!r}, which is none of the {n_choices} choices")
    return ascii_uppercase[number]


def _strip_question(texts: dict[str, str]) -> None:
    if "question" in texts:
        texts["question"] = texts["question"].strip()


def _check_source_text(row: Row, item: Item) -> None:
    if row.task.quality == "alignscore_source" and not item.source.strip():
        raise row.wrong(" or ".join(_SOURCES), "is missing or blank, and quality measures answers against it")
