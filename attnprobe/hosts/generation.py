"""Listening to `generate`: which forwards belong together cannot be told from the forwards alone.

A model that decodes without a cache sends every row again at each step; a batch runs on after some of its rows have
stopped; the last token is chosen and never fed back. While anybody listens, the model's `generate` is shadowed on
the instance by a function that tells the listeners and calls it; the shadow goes with the last listener.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attnprobe.hosts.base import Generation, Listener

_NAMES = ("generate", "hf_generate", "generate_stream")
_listeners: weakref.WeakKeyDictionary[Any, list[Listener]] = weakref.WeakKeyDictionary()


@contextmanager
def listen_to_generate(model: Any, listener: Listener) -> Iterator[None]:
    """Tell the listener when a `generate` of this model begins and ends."""
    listeners = _listeners.setdefault(model, [])
    if not listeners:
        _shadow(model, listeners)
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
        if not listeners:
            _unshadow(model)
            _listeners.pop(model, None)


def _shadow(model: Any, listeners: list[Listener]) -> None:
    for name in _NAMES:
        if name in vars(model):  # the user's own: theirs is called, not replaced
            continue
        method = getattr(type(model), name, None)
        if method is None:
            continue
        bound = method.__get__(model)
        wrap = _told_stream if name == "generate_stream" else _told
        shadow = functools.wraps(method)(wrap(model, bound, listeners))
        shadow.__dict__["_attnprobe"] = True
        vars(model)[name] = shadow


def _unshadow(model: Any) -> None:
    for name in _NAMES:
        if getattr(vars(model).get(name), "_attnprobe", False):
            del vars(model)[name]


def _told(model: Any, method: Callable[..., Any], listeners: list[Listener]) -> Callable[..., Any]:
    def generate(*args: Any, **kwargs: Any) -> Any:
        generation = _generation(model, method, args, kwargs)
        told = list(listeners)
        output = None
        try:
            for listener in told:
                listener.on_generate(generation)
            output = method(*args, **kwargs)
            return output
        finally:
            for listener in told:
                listener.on_generate_end(output)

    return generate


def _told_stream(model: Any, method: Callable[..., Any], listeners: list[Listener]) -> Callable[..., Any]:
    def generate_stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
        generation = _generation(model, method, args, kwargs)
        told = list(listeners)
        try:
            for listener in told:
                listener.on_generate(generation)
            yield from method(*args, **kwargs)
        finally:  # also when the stream is abandoned half way
            for listener in told:
                listener.on_generate_end(None)

    return generate_stream


def _generation(model: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generation:
    given = _arguments(method, args, kwargs)
    config = getattr(getattr(model, "original_model", model), "generation_config", None)
    if (given.get("num_beams") or 1) > 1:
        raise ValueError(
            "beam search reorders its hypotheses at every step, so no row belongs to a sequence for good: "
            "generate with num_beams=1 under a probe, then score the finished text."
        )
    stop: tuple[int, ...] = ()
    if given.get("stop_at_eos", True):
        stop = _ids(given.get("eos_token_id")) or _default_stop_tokens(model, config)
    return Generation(
        stop_tokens=stop,
        max_forwards=given.get("max_new_tokens"),
        looks_back=bool(given.get("return_cache", False)),
    )


def _arguments(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(parameter.name, {}))
    return given


def _default_stop_tokens(model: Any, config: Any) -> tuple[int, ...]:
    for holder in (getattr(model, "cfg", None), config, getattr(model, "tokenizer", None)):
        ids = _ids(getattr(holder, "eos_token_id", None))
        if ids:
            return ids
    return ()


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)
