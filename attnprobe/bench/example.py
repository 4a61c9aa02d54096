"""What a benchmark asks: one prompt, and what counts as a right answer to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """One prompt of a task.

    Attributes:
        id: unique within its task, and the same whatever part of the task is evaluated.
        prompt: the text that the model goes on from, few-shot examples included.
        references: accepted answers, at least one.
        source: the text that an answer has to be true to (article, dialogue, story); "" where there is none.
        fields: the row under the benchmark's own names (question, choices, subject, ...).

    >>> Example("q1", "Question: Who wrote Hamlet?\\nAnswer:", ("Shakespeare",)).source
    ''
    """

    id: str
    prompt: str
    references: tuple[str, ...]
    source: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
