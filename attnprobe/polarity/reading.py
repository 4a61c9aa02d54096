"""Answers as token ids, cut to a length by a rule that is stated and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnprobe.polarity.answers import LabelledAnswer
from attnprobe.truncation import SHORTEST_PROMPT, middle_cut

TRUNCATION = (
    "a prompt that is too long loses the middle: its first ceil(k/2) and its last floor(k/2) tokens stay, k being what "
    f"the answer leaves of max_tokens; an answer is never cut, and one that leaves fewer than {SHORTEST_PROMPT} tokens "
    "to a longer prompt is left out"
)


@dataclass(frozen=True)
class Reading:
    """What the model reads of one answer.

    Attributes:
        answer: which.
        prompt, completion: token ids.
        cut: how many tokens of the prompt were taken out.
        error: why it is not read; None if it is.
    """

    answer: LabelledAnswer
    prompt: list[int]
    completion: list[int]
    cut: int = 0
    error: str | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def readings(answers: Sequence[LabelledAnswer], tokenizer: Any, max_tokens: int) -> list[Reading]:
    """Tokenize and cut: the prompt as the tokenizer does by itself, the answer after a space, no special tokens.

    Args:
        max_tokens: prompt and answer together, at most.

    Raises:
        ValueError: max_tokens that leaves no room for an answer.
    """
    if max_tokens <= SHORTEST_PROMPT:
        raise ValueError(f"max_tokens={max_tokens!r}: use at least {SHORTEST_PROMPT + 1}.")
    return [_reading(answer, tokenizer, max_tokens) for answer in answers]


def _reading(answer: LabelledAnswer, tokenizer: Any, max_tokens: int) -> Reading:
    prompt = list(tokenizer(answer.prompt)["input_ids"])
    completion = list(tokenizer(" " + answer.answer, add_special_tokens=False)["input_ids"])
    keep = max_tokens - len(completion)
    if not prompt or not completion:
        return Reading(answer, prompt, completion, error="the tokenizer makes no token of the prompt or the answer")
    if keep < min(SHORTEST_PROMPT, len(prompt)):
        error = f"the answer has {len(completion)} tokens and leaves no room for a prompt in {max_tokens}"
        return Reading(answer, prompt, completion, error=error)
    kept = middle_cut(prompt, keep)
    return Reading(answer, kept, completion, cut=len(prompt) - len(kept))
