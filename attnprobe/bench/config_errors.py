"""One sentence for the first thing that is wrong with a configuration."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

Location = tuple[int | str, ...]

# What should be there, by pydantic's own name of the mistake.
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_unicode": "text of valid Unicode",
    "bool_type": "true or false",
    "path_type": "a path",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
}


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, whatever its case.

    >>> nearest("trivia_qa", ["TriviaQA", "XSum"])
    'TriviaQA'
    """
    plain = {_plain(known): known for known in names}
    found = difflib.get_close_matches(_plain(name), plain, n=1)
    return plain[found[0]] if found else None


def dotted(location: Sequence[int | str]) -> str:
    """Where in the file: `tasks[0].limit`.

    >>> dotted(("tasks", 0, "limit"))
    'tasks[0].limit'
    """
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def first_sentence(error: ValidationError, keys_at: Callable[[Location], Iterable[str]]) -> str:
    """The first mistake that pydantic found, as a sentence that names the key.

    Args:
        keys_at: the keys that are valid beside a wrong one.
    """
    mistake = error.errors(include_url=False)[0]
    location: Location = mistake["loc"]
    kind = mistake["type"]
    if kind == "extra_forbidden":
        return _unknown_key(location, sorted(keys_at(location)))
    if kind == "missing":
        where = dotted(location[:-1])
        return f"{where or 'the file'} has no {str(location[-1])!r}, which it needs"
    if kind in ("value_error", "assertion_error"):
        # Our own sentence; it names the key itself where the mistake is in how keys fit together.
        said = str(mistake["ctx"]["error"]).rstrip(".")
        return f"{dotted(location)}: {said}" if location else said
    if kind == "literal_error":
        return _no_choice(location, mistake["input"], mistake["ctx"]["expected"])
    if kind in ("too_short", "string_too_short"):
        return f"{dotted(location)} is empty: it needs at least one"
    shown = reprlib.repr(mistake["input"])
    if kind in _WANTED:
        return f"{dotted(location) or 'the file'} is {shown}, and must be {_WANTED[kind]}"
    reason = mistake["msg"].replace("Input should be", "it must be")
    return f"{dotted(location)} is {shown}: {reason}"


def _unknown_key(location: Location, valid: list[str]) -> str:
    near = nearest(str(location[-1]), valid)
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(valid)}"
    where = dotted(location[:-1])
    return f"{f'{where} has' if where else 'there is'} an unknown key {str(location[-1])!r}: {hint}"


def _no_choice(location: Location, given: Any, expected: str) -> str:
    choices = [choice.strip("' ") for choice in expected.replace(" or ", ",").split(",")]
    near = nearest(given, choices) if isinstance(given, str) else None
    hint = f"did you mean {near!r}? " if near else ""
    return f"{dotted(location)} is {reprlib.repr(given)}: {hint}there are {', '.join(choices)}"


def _plain(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())
