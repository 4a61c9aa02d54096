"""Scores from a name and options, as a configuration file has them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from attnprobe.bench.own_code import imported
from attnprobe.uncertainty.registry import AnyMethod, method_named


def build_method(name: str, options: Mapping[str, Any], label: str | None = None) -> AnyMethod:
    """The score `name` with `options` in place of its own settings, called `label` in results.

    Args:
        name: as in `attnprobe.uncertainty.method_names()`, or "module:Class" for one of your own, found as Python finds
            modules and in the current folder.
        options: arguments of the method.
        label: what it is called; its own name by default.

    Raises:
        ValueError: an unknown name or option, a class that cannot be imported, or a value that the method refuses.

    >>> build_method("SAUQ-generation", {"alpha": 0.5}, "half").scope
    'generation'
    """
    method = _own(name) if ":" in name else method_named(name)
    if options:
        method = _with_options(name, method, options)
    if label is not None:
        method.name = label
    return method


def _own(name: str) -> AnyMethod:
    found = imported(name, "the method")
    if not (isinstance(found, type) and issubclass(found, AnyMethod)):
        raise ValueError(f"the method {name!r} is no class of scores: derive it from attnprobe.Recurrent, or another")
    try:
        method = found()
    except Exception as error:  # the user's own code, which may raise anything
        raise ValueError(f"the method {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(method, "name", None), str):
        raise ValueError(f"the method {name!r} has no name: give its class a `name`")
    return method


def _with_options(name: str, method: AnyMethod, options: Mapping[str, Any]) -> AnyMethod:
    arguments = inspect.signature(type(method)).parameters
    for option in options:
        if option not in arguments:
            near = difflib.get_close_matches(option, arguments, n=1)
            others = f"it has {', '.join(arguments)}" if arguments else "it has none"
            hint = f"did you mean {near[0]!r}?" if near else others
            raise ValueError(f"the method {name} has no option {option!r}: {hint}")
    # "SAUQ-generation" is SAUQ with a scope: what the name has set stays, unless an option says otherwise. Only what
    # the object keeps is looked at, as a property may load a model.
    preset = {argument: value for argument, value in vars(method).items() if argument in arguments}
    try:
        return type(method)(**{**preset, **options})
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"the method {name} refuses its options: {error}") from None
