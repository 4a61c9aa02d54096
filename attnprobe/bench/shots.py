"""Few-shot examples: where they come from, and that none of them is asked as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attnprobe.bench.config import TaskConfig
from attnprobe.bench.data import Table, read_table
from attnprobe.bench.items import Item, by_subject, items_of_row, used_names
from attnprobe.bench.rows import Row

# subject ("" where there are none) -> its few-shot examples, in their order
Shots = Mapping[str, Sequence[Item]]


def choose_shots(task: TaskConfig, items: Sequence[Item], seed: int) -> tuple[Shots, list[Item]]:
    """The few-shot examples of a task, and the items that are left to ask.

    From data of their own they are drawn by `seed`; otherwise they are the first items, of every subject where there
    are subjects. An item that reads as one of the examples is left out: the answer would be in the prompt.

    Raises:
        ValueError: too few rows.
    """
    if task.shots == 0:
        return {}, list(items)
    if task.shots_data is None and task.shots_split is None:
        shots = _first(task, items)
    else:
        name = task.shots_data or task.data
        subset = task.shots_subset if task.shots_data is not None else task.shots_subset or task.subset
        shots = _drawn(task, read_table(name, subset, task.shots_split), items, seed)
    taken = {_question(task, shot) for group in shots.values() for shot in group}
    left = [item for item in items if _question(task, item) not in taken]
    if not left:
        raise ValueError(f"the task {task.label!r} has no row left to ask: every one is among its few-shot examples")
    return shots, left


def _first(task: TaskConfig, items: Sequence[Item]) -> Shots:
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.subject, []).append(item)
    for subject, group in groups.items():
        if len(group) <= task.shots:
            raise ValueError(
                f"the task {task.label!r} has {_rows(len(group))}{_of(subject)}, and shots takes {task.shots} of them "
                "and leaves none to ask: use fewer shots, or give shots_data"
            )
    return {subject: group[: task.shots] for subject, group in groups.items()}


def _drawn(task: TaskConfig, table: Table, items: Sequence[Item], seed: int) -> Shots:
    # NumPy's legacy generator, one for all subjects in their order: with the same seed the examples are the ones that
    # LM-Polygraph draws. Rows that are not drawn are not even read: there may be a hundred thousand.
    draw = np.random.RandomState(seed)
    pools = _pools(task, table)
    shots = {}
    for subject in sorted({item.subject for item in items}):
        pool = pools.get(subject, [])
        if len(pool) < task.shots:
            raise ValueError(
                f"the task {task.label!r} takes {task.shots} shots, and {table.name} has "
                f"{_rows(len(pool))}{_of(subject)}"
            )
        chosen = [pool[i] for i in draw.permutation(len(pool))[: task.shots]]
        shots[subject] = [item for index in chosen for item in items_of_row(Row.at(table, index, task))]
    return shots


def _pools(task: TaskConfig, table: Table) -> Mapping[str, Sequence[int]]:
    everything = range(len(table.rows))
    if not by_subject(task):
        return {"": everything}
    pools: dict[str, list[int]] = {}
    for index in everything:
        pools.setdefault(Row.at(table, index, task).text("subject"), []).append(index)
    return pools


def _question(task: TaskConfig, item: Item) -> tuple[str, ...]:
    """What the prompt of an item says, whatever its case and spaces."""
    return tuple(" ".join(item.texts[name].casefold().split()) for name in sorted(used_names(task)))


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _of(subject: str) -> str:
    return f" of the subject {subject!r}" if subject else ""
