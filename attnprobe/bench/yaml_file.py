"""A YAML file as plain data: no tags that make objects, no key twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnprobe.bench.extra import need


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ValueError: a file that cannot be read or is no YAML mapping, in one sentence that names it.
        ImportError: PyYAML is not installed.
    """
    yaml = need("yaml")
    text = _text(path)
    try:
        said = yaml.safe_load(text)
        twice = _key_twice(yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{str(path)!r} is not a YAML file that can be read: {_reason(error)}") from None
    except RecursionError:
        raise ValueError(f"{str(path)!r} is not a YAML file that can be read: it is nested too deeply") from None
    except Exception as error:
        # PyYAML's constructors raise whatever Python does: ValueError for the 13th month, AttributeError for no date.
        fits = isinstance(error, yaml.YAMLError | ValueError) and str(error)
        reason = str(error).splitlines()[0] if fits else "a value is not what its tag says"
        raise ValueError(f"{str(path)!r} is not a YAML file that can be read: {reason}") from None
    if twice is not None:
        raise ValueError(f"{str(path)!r} has the key {twice[0]!r} a second time in line {twice[1]}")
    if said is None:
        raise ValueError(f"{str(path)!r} is empty: a configuration has at least methods, tasks and output")
    if not isinstance(said, dict) or not all(isinstance(key, str) for key in said):
        raise ValueError(f"{str(path)!r} is no configuration: it must be a mapping of keys such as methods and tasks")
    return said


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not UTF-8 text") from None
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{str(path)!r} cannot be read: {reason}") from None


def _reason(error: Any) -> str:
    problem = " ".join(str(error.problem or error.context or "it breaks off").split())
    mark = error.problem_mark or error.context_mark
    if "could not determine a constructor for the tag" in problem:
        # Tags such as !!python/object/apply run code in loaders that allow it; this one never does.
        problem = f"tags that make objects are not allowed, as {problem.split(' the tag ')[-1]}"
    return f"{problem}, line {mark.line + 1}" if mark is not None else problem


def _key_twice(root: Any) -> tuple[str, int] | None:
    """The first key that a mapping has twice, and its line: YAML would silently take the last."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.id == "sequence":
            waiting += node.value
        elif node.id == "mapping":
            keys: set[str] = set()
            for key, value in node.value:
                waiting += [key, value]
                if key.id == "scalar":
                    if key.value in keys:
                        return key.value, key.start_mark.line + 1
                    keys.add(key.value)
    return None
