"""What is left of a prompt that is too long."""

from __future__ import annotations

from collections.abc import Sequence

#: A prompt that must be cut keeps at least so many tokens.
SHORTEST_PROMPT = 16


def middle_cut(prompt: Sequence[int], keep: int) -> list[int]:
    """The first ceil(keep/2) and the last floor(keep/2) tokens of a prompt that has more than `keep`.

    It loses its middle, and keeps where it begins and what it asks.

    >>> middle_cut([1, 2, 3, 4, 5, 6], 3)
    [1, 2, 6]
    """
    if len(prompt) <= keep:
        return list(prompt)
    return [*prompt[: (keep + 1) // 2], *prompt[len(prompt) - keep // 2 :]]
