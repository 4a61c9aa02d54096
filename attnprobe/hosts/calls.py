"""Listening to the forwards of a torch module: what each was given, and that it went through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attnprobe.hosts.base import Call, Listener, Stream


def listen_to_module(
    module: nn.Module, listener: Listener, before_call: Callable[[], None], *, logits: bool
) -> list[Any]:
    """Tell the listener of every forward of a module that takes tokens, mask and cache as arguments.

    Returns:
        Handles; `remove()` of each ends it.
    """

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before_call()
        listener.on_call(_call_of(args, kwargs))

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if logits:
            listener.on_logits(_logits_of(output))
        listener.on_call_end(getattr(output, "past_key_values", None))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _call_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim != 2:
        tokens = None
    mask = kwargs.get("attention_mask")
    cache = kwargs.get("past_key_values")
    past = _cached(cache)
    if "decoder_input_ids" in kwargs or "encoder_outputs" in kwargs:
        return Call(
            decoder=Stream(kwargs.get("decoder_input_ids"), kwargs.get("decoder_attention_mask"), past, cache),
            encoder=Stream(tokens, mask, 0),
        )
    stream = Stream(tokens, mask, past, cache)
    return Call(decoder=stream, encoder=Stream(tokens, mask, 0))


def _cached(cache: Any) -> int | None:
    """Tokens a transformers cache holds."""
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    return None


def _logits_of(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple):
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ValueError(
            "token probabilities were asked for and this model's forward returns no next-token logits "
            "[batch, query, vocab]."
        )
    return logits
