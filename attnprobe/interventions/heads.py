"""Which heads of a model are meant: (layer, head) pairs, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from attnprobe.hosts import Host, Site
from attnprobe.probe_settings import DEFAULT_PATTERN, ranges


def heads_by_site(heads: Any, host: Host) -> dict[Site, tuple[int, ...]]:
    """The sites of the given (layer, head) pairs, and the heads at each in ascending order.

    Raises:
        TypeError: not pairs of whole numbers.
        ValueError: a layer without attention, or a head that the layer has not.
    """
    pairs = set(_pairs(heads))
    sites = {site.layer: site for site in host.sites(DEFAULT_PATTERN)}
    missing = sorted({layer for layer, _ in pairs} - set(sites))
    if missing:
        raise ValueError(f"layer {missing[0]} has no attention heads here; layers with some: {ranges(sorted(sites))}.")
    for layer, head in sorted(pairs):
        if head < 0 or (host.n_heads is not None and head >= host.n_heads):
            raise ValueError(f"head {head} of layer {layer} was named and {_offer(host.n_heads)}.")
    return {
        site: tuple(sorted(head for layer, head in pairs if layer == site.layer))
        for site in sites.values()
        if any(layer == site.layer for layer, _ in pairs)
    }


def _pairs(heads: Any) -> list[tuple[int, int]]:
    if hasattr(heads, "tolist"):
        heads = heads.tolist()
    if isinstance(heads, str) or not isinstance(heads, Iterable):
        raise TypeError(f"heads={heads!r}: give a list of (layer, head) pairs.")
    pairs = []
    for pair in heads:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(_is_whole, pair)):
            raise TypeError(
                f"heads holds {pair!r}: give (layer, head) pairs of whole numbers, such as [(3, 0), (3, 1)]."
            )
        pairs.append((int(pair[0]), int(pair[1])))
    return pairs


def _is_whole(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _offer(n_heads: int | None) -> str:
    return "heads are counted from 0" if n_heads is None else f"the model has heads 0 to {n_heads - 1}"
