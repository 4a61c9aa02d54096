"""Bridges to other libraries. Each needs its own extra, and is loaded when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = ["lm_polygraph"]

if TYPE_CHECKING:
    from attnprobe.integrations import lm_polygraph


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return importlib.import_module(f"{__name__}.{name}")
