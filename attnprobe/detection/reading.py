"""A prompt and its answer as token ids, cut to a length by a rule that is stated and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnprobe.truncation import SHORTEST_PROMPT, middle_cut

Text = str | Sequence[int]


@dataclass(frozen=True)
class Reading:
    """What the model reads.

    Attributes:
        prompt, answer: token ids.
        cut: how many tokens of the prompt were taken out.
    """

    prompt: list[int]
    answer: list[int]
    cut: int = 0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def reading_of(prompt: Text, answer: Text, tokenizer: Any, max_tokens: int, which: str) -> Reading:
    """Tokenize a prompt and its answer, and cut the prompt where both are too long.

    A prompt is tokenized as the tokenizer does by itself, an answer without special tokens; one space parts them,
    unless there is white space already. Of a prompt that is too long the first ceil(m/2) and the last floor(m/2) tokens
    stay, m being what the answer leaves of max_tokens: it loses its middle, and keeps where it begins and what it asks.
    An answer is never cut.

    Args:
        prompt, answer: strings, or token ids.
        tokenizer: for strings.
        max_tokens: prompt and answer together, at most.
        which: what the error messages call the text.

    Raises:
        ValueError: no tokenizer for a string, an empty or blank text, or an answer that leaves fewer than 16 tokens
            to a longer prompt.
        TypeError: neither a string nor token ids.

    >>> long = reading_of(list(range(40)), [7, 7], None, 20, "text 0")
    >>> long.prompt, long.cut
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 34, 35, 36, 37, 38, 39], 22)
    """
    if isinstance(prompt, str) and isinstance(answer, str) and not (prompt[-1:].isspace() or answer[:1].isspace()):
        answer = " " + answer
    prompt_ids = _ids(prompt, tokenizer, f"the prompt of {which}", special=True)
    answer_ids = _ids(answer, tokenizer, f"the answer of {which}", special=False)
    keep = max_tokens - len(answer_ids)
    if len(prompt_ids) <= keep:
        return Reading(prompt_ids, answer_ids)
    if keep < SHORTEST_PROMPT:
        raise ValueError(
            f"the answer of {which} has {len(answer_ids)} tokens and leaves no room for its prompt of "
            f"{len(prompt_ids)} in max_tokens={max_tokens}: use more, or leave the text out."
        )
    kept = middle_cut(prompt_ids, keep)
    return Reading(kept, answer_ids, len(prompt_ids) - len(kept))


def _ids(text: Text, tokenizer: Any, what: str, *, special: bool) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError(f"{what} is a string and the model has no tokenizer: pass tokenizer=, or token ids.")
        if not text.strip():
            raise ValueError(f"{what} is blank: there is nothing to read.")
        ids = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    else:
        if hasattr(text, "tolist"):
            text = text.tolist()
        if not isinstance(text, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in text):
            raise TypeError(f"{what} must be a string or a list of token ids.")
        ids = list(text)
    if not ids:
        raise ValueError(f"{what} has no token.")
    return ids
