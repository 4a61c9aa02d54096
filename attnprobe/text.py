"""Text that a model or a user wrote, made safe to show."""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200c\u200d"  # part of the spelling in several scripts and of many emoji
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def visible(text: str, *, keep: str = "") -> str:
    r"""Spell out every character that would move a cursor, change a colour or turn the writing direction.

    Args:
        text: what a model or a user wrote.
        keep: control characters to leave as they are, for example a newline.

    Example:
        >>> print(visible("a\x1b[31mb\n"))
        a\x1b[31mb\n
    """

    def spell(character: str) -> str:
        if character in keep or character in _JOINERS or unicodedata.category(character) not in _HIDDEN:
            return character
        return character.encode("unicode_escape").decode("ascii")

    return "".join(map(spell, text))
