"""The optional packages of the benchmark, and what is said where one is missing."""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = 'pip install "attnprobe[bench]"'


def need(module: str) -> Any:
    """Import an optional module.

    Raises:
        ImportError: it is not installed; the sentence says how to get it.

    >>> need("json").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # What is missing may be something that the module itself wants: then that is the name to say.
        raise ImportError(f"the benchmark needs the package {error.name!r}: {INSTALL}") from error
