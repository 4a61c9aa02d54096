"""Repeating a key/value cache, so that several continuations of one prompt read the prompt once."""

from __future__ import annotations

import copy
from typing import Any


def repeated(cache: Any, n: int) -> Any:
    """A copy of the cache of one sequence for n of them; the given one stays as it is.

    Returns:
        The copy, or None where the cache is of a kind that is not known to hold keys and values alone: a state that
        was left behind would not be an error, only wrong.
    """
    if hasattr(cache, "layers") and all(_holds_keys_and_values(layer) for layer in cache.layers):
        ours = copy.deepcopy(cache)
        ours.batch_repeat_interleave(n)
        return ours
    if hasattr(cache, "entries") and hasattr(cache, "previous_attention_mask"):  # a HookedTransformer's
        ours = copy.deepcopy(cache)
        for entry in ours.entries:
            entry.past_keys = entry.past_keys.repeat_interleave(n, 0)
            entry.past_values = entry.past_values.repeat_interleave(n, 0)
        ours.previous_attention_mask = ours.previous_attention_mask.repeat_interleave(n, 0)
        return ours
    return None


def _holds_keys_and_values(layer: Any) -> bool:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    # these very classes: what derives from them keeps more, and repeats only some of it
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
