"""Which host serves a model: told by what the model offers, never by importing its library."""

from __future__ import annotations

from typing import Any

from attnprobe.hosts.base import Host
from attnprobe.hosts.transformer_lens import HookedHost


def host_of(model: Any) -> Host:
    """The host of a model.

    Raises:
        TypeError: the model offers no named hook points.
    """
    if isinstance(getattr(model, "hook_dict", None), dict):
        return HookedHost(model)
    raise TypeError(
        f"a probe attaches to models with named hook points (`hook_dict`), such as a TransformerBridge, a "
        f"HookedTransformer or any HookedRootModule; {type(model).__name__} has none. "
        "attnprobe.load_model(model) wraps a transformers model."
    )
