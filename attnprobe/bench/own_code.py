"""Functions and classes of the user's own, named in a configuration as `module:name`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def imported(name: str, what: str) -> Any:
    """What `module:name` stands for, found as Python finds modules and in the current folder.

    Args:
        name: `module:name`, with dots on either side.
        what: how to call it in an error: "the quality", "the method".

    Raises:
        ValueError: it cannot be imported.

    >>> imported("math:pi", "the number")
    3.141592653589793
    """
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = _import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        # Importing runs the user's module, which may raise anything.
        raise ValueError(f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def _import_module(name: str) -> Any:
    # The folder of an installed command is on the path, and not the one that the user is in.
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)
