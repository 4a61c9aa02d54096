"""Which host serves a model: told by what the model offers, never by importing its library."""

from __future__ import annotations

from typing import Any

from attnprobe.hosts.base import Host
from attnprobe.hosts.transformer_lens import HookedHost
from attnprobe.hosts.transformers import TransformersHost


def host_of(model: Any) -> Host:
    """The host of a model.

    Raises:
        TypeError: the model offers neither named hook points nor the attention interface of transformers.
    """
    if isinstance(getattr(model, "hook_dict", None), dict):
        return HookedHost(model)
    if hasattr(getattr(model, "config", None), "_attn_implementation_internal"):
        return TransformersHost(model)
    raise TypeError(
        f"a probe attaches to a transformers model, or to one with named hook points (`hook_dict`) such as a "
        f"TransformerBridge, a HookedTransformer or any HookedRootModule; {type(model).__name__} is neither"
        + (f": load one by its name with attnprobe.load_model({model!r})." if isinstance(model, str) else ".")
    )
