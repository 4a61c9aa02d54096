"""Leverage scores of a model's unembedding, computed once for each model."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from jaxtyping import Float
from torch import Tensor

from attnprobe.functional.measures import leverage_scores
from attnprobe.hosts.base import Host

_known: WeakKeyDictionary[Any, tuple[tuple[float, ...], Tensor]] = WeakKeyDictionary()


def leverage_of(host: Host) -> Float[Tensor, "vocab"]:
    """The scores of the host's unembedding as it is now; a matrix that has changed since is computed again."""
    unembedding = host.unembedding().detach()
    # in-place edits may leave no other mark than the values themselves
    mark = (*unembedding.shape, float(unembedding.sum()), float(unembedding.norm()))
    known = _known.get(host.model)
    if known is None or known[0] != mark:
        known = _known[host.model] = mark, leverage_scores(unembedding)
    return known[1]
