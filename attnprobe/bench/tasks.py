"""From a task's rows to the examples of a benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnprobe.bench.example import Example

if TYPE_CHECKING:
    from attnprobe.bench.config import TaskConfig


def examples(task: TaskConfig, *, seed: int = 0) -> list[Example]:
    """The examples of a task, in the order in which they are asked."""
    raise NotImplementedError
