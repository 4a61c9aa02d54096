"""Head outputs that are replaced on their way to the output projection, whatever the library.

A host shows each passing output to the replacements at that place, in the order in which they came, so that the last
one has the last word. All of them are also shown what the heads computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnprobe.hosts.base import Call, HeadOutputs, Replace, Site, Stream


class Replacement:
    """One function that replaces outputs at some sites, and the forwards in which it does.

    Args:
        replace: from what passes to the new z.
        sites: where it is to be called in every forward.
        why_silent: what may be the matter at a site where it was not.
    """

    def __init__(self, replace: Replace, sites: Sequence[Site], why_silent: Callable[[Site], str]) -> None:
        self._replace = replace
        self._sites = sites
        self._why_silent = why_silent
        self._call: Call | None = None
        self._running = False
        self._silent: set[Site] = set()

    def on_call(self, call: Call) -> None:
        self._call = call
        self._running = True
        self._silent = set(self._sites)

    def on_logits(self, logits: Tensor) -> None:
        """Not asked for."""

    def on_call_end(self, cache: Any = None) -> None:
        self._running = False
        if self._silent:
            first = min(self._silent, key=lambda site: site.layer)
            raise ValueError(
                f"head outputs were to be replaced at {first.name} and none passed in this forward: "
                f"{self._why_silent(first)}."
            )

    def __call__(self, site: Site, z: Tensor, computed: Tensor, v: Tensor | None) -> Tensor:
        """The outputs of a site, replaced."""
        self._silent.discard(site)
        return self._replace(HeadOutputs(site, z, computed, v, self.stream))

    @property
    def stream(self) -> Stream | None:
        """The forward that runs, or the last one while a backward pass computes attention again."""
        again = torch._C._current_graph_task_id() != -1
        return self._call.decoder if self._call is not None and (self._running or again) else None


@dataclass
class _Place:
    """The replacements at one module of a host, and what brings outputs to them."""

    installed: ExitStack = field(default_factory=ExitStack)
    replacements: list[tuple[Site, Replacement]] = field(default_factory=list)


_places: weakref.WeakKeyDictionary[Any, _Place] = weakref.WeakKeyDictionary()


@contextmanager
def placed(
    module: Any, site: Site, replacement: Replacement, install: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """One more replacement at a module; the first one installs what calls `replaced`, the last one takes it out."""
    place = _places.setdefault(module, _Place())
    entry = (site, replacement)
    try:
        if not place.replacements:
            place.installed.enter_context(install())
        place.replacements.append(entry)
        yield
    finally:
        if entry in place.replacements:
            place.replacements.remove(entry)
        if not place.replacements:
            _places.pop(module, None)
            place.installed.close()


def replaced(module: Any, computed: Tensor, v: Tensor | None = None) -> Tensor:
    """The head outputs [batch, query, head, d] that go on from a module, with the values they were computed from."""
    z = computed
    place = _places.get(module)
    for site, replacement in () if place is None else place.replacements:
        z = replacement(site, z, computed, v)
    return z
