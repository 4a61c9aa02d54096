"""How much the analyzers of a probe hold: the bytes of the tensors that can be reached from its streams.

Unlike the peak of a process this has no noise, so its growth with the length of the text is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import attnprobe as ap


def state_bytes(probe: ap.Probe) -> int:
    """Bytes of the tensors that the analyzers hold, each storage counted once.

    Rows that wait to be handed on are handed on first: they are no state of an analyzer, and how many wait depends on
    the number of tokens generated.
    """
    with torch.inference_mode():
        for stream in probe._streams.values():
            stream.flush()
    return tensor_bytes(probe._streams)


def tensor_bytes(root: Any) -> int:
    """Bytes of the storages that can be reached from an object: through containers, and through objects of attnprobe.

    Nothing else is entered, so that neither the model nor its key/value cache is counted.
    """
    seen: set[int] = set()
    storages: dict[int, int] = {}
    pending = [root]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            pending += _inside(item)
    return sum(storages.values())


def _inside(item: Any) -> Iterable[Any]:
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values()]
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if type(item).__module__.split(".")[0] == ap.__name__:
        slots = [getattr(item, name, None) for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        return [*getattr(item, "__dict__", {}).values(), *slots]
    return []
