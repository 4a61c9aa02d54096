"""From a task's rows to the examples that are asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from attnprobe.bench.builtin import BUILT_IN
from attnprobe.bench.config import TaskConfig
from attnprobe.bench.data import read_table
from attnprobe.bench.example import Example
from attnprobe.bench.items import Item, by_subject, items_of
from attnprobe.bench.prompts import Template, join, render_question, render_shot
from attnprobe.bench.shots import Shots, choose_shots


def task_names() -> list[str]:
    """The built-in tasks.

    >>> task_names()[:3]
    ['TriviaQA', 'TruthfulQA', 'MMLU']
    """
    return list(BUILT_IN)


def examples(task: TaskConfig, *, seed: int = 0) -> list[Example]:
    """The examples of a task, in the order in which they are asked.

    An example has the same id and the same prompt whatever `limit`, `offset` and `shuffle_seed` are.

    Args:
        task: with absolute paths, as `load_config` gives it.
        seed: draws the few-shot examples where they have data of their own.

    Raises:
        ValueError: data that cannot be read, a row that lacks something, or nothing left to ask; in one sentence.
        ImportError: a package that reading the data needs is not installed.
    """
    items = _with_own_ids(items_of(read_table(task.data, task.subset, task.split), task))
    shots, items = choose_shots(task, items, seed)
    return [_example(task, item, shots) for item in _selected(task, items)]


def _with_own_ids(items: Sequence[Item]) -> list[Item]:
    """Every id once: TriviaQA on the hub has a question with web pages and again with Wikipedia's."""
    taken = {item.id for item in items}
    count: dict[str, int] = {}
    own = []
    for item in items:
        number = count[item.id] = count.get(item.id, 0) + 1
        name = item.id
        if number > 1:
            name = f"{item.id}#{number}"
            while name in taken:  # some other row is called just so
                name += "'"
            taken.add(name)
        own.append(item if name == item.id else replace(item, id=name))
    return own


def _selected(task: TaskConfig, items: Sequence[Item]) -> list[Item]:
    """The items that are asked, in their order.

    Raises:
        ValueError: none.
    """
    selected = list(items)
    if by_subject(task):
        selected.sort(key=lambda item: item.subject)
        if task.max_per_subject is not None:
            selected = _capped(selected, task.max_per_subject)
    available = len(selected)
    selected = selected[task.offset :]
    if task.shuffle_seed is not None:
        # NumPy's legacy generator: the first of its permutation are the rows that LM-Polygraph draws with that seed.
        order = np.random.RandomState(task.shuffle_seed).permutation(len(selected))
        selected = [selected[i] for i in order]
    if not selected:
        raise ValueError(f"the task {task.label!r} has {available} examples, and offset={task.offset} leaves none")
    return selected[: task.limit]


def _capped(items: Iterable[Item], most: int) -> list[Item]:
    count: dict[str, int] = {}
    capped = []
    for item in items:
        count[item.subject] = count.get(item.subject, 0) + 1
        if count[item.subject] <= most:
            capped.append(item)
    return capped


def _example(task: TaskConfig, item: Item, shots: Shots) -> Example:
    template = Template(task.template)
    before = [render_shot(template, shot.texts, shot.answer) for shot in shots.get(item.subject, ())]
    before += [
        render_shot(template, {**item.texts, "question": question.strip()}, answer) for question, answer in item.turns
    ]
    question = render_question(template, item.texts)
    prompt = join(Template(task.preamble).fill(item.texts), before, question, task.separator)
    return Example(item.id, prompt, item.references, item.source, item.fields)
