"""Listening to the forwards of a torch module: what each was given, and that it went through."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.hosts.base import Call, CallListener, Stream


def listen_to_module(
    module: nn.Module,
    listener: CallListener,
    before_call: Callable[[], None],
    after_call: Callable[[], None] = lambda: None,
    *,
    logits: bool,
) -> list[Any]:
    """Tell the listener of every forward of a module that takes tokens, mask and cache as arguments.

    Returns:
        Handles; `remove()` of each ends it.
    """
    positional = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    has_encoder = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))

    @torch.compiler.disable
    def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if called is module:  # a copy of the model has copies of our hooks
            before_call()
            given = {**dict(zip(positional, args, strict=False)), **kwargs}
            given.setdefault("input_ids", args[0] if args else None)
            listener.on_call(_call_of(given, has_encoder))

    @torch.compiler.disable
    def after(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if called is module:
            after_call()
            if logits:
                listener.on_logits(_logits_of(output))
            listener.on_call_end(getattr(output, "past_key_values", None))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _call_of(given: dict[str, Any], has_encoder: bool) -> Call:
    tokens = given["input_ids"]
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim != 2:
        tokens = None
    mask = given.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(
            f"the attention mask is a {type(mask).__name__}, which does not say which tokens are padding: pass a "
            "[batch, tokens] mask of 0 and 1."
        )
    cache = given.get("past_key_values")
    past = _cached(cache)
    if has_encoder or "decoder_input_ids" in given or "encoder_outputs" in given:
        return Call(
            decoder=Stream(given.get("decoder_input_ids"), given.get("decoder_attention_mask"), past, cache),
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
