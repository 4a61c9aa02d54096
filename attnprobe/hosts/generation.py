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

from torch import Tensor

from attnprobe.hosts.base import Generation, Listener

_NAMES = ("generate", "hf_generate", "generate_stream")
_listeners: weakref.WeakKeyDictionary[Any, list[Listener]] = weakref.WeakKeyDictionary()
_running: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def listen_to_generate(model: Any, listener: Listener) -> Iterator[None]:
    """Tell the listener when a `generate` of this model begins and ends."""
    listeners = _listeners.setdefault(model, [])
    if not listeners:
        for holder in _holders(model):
            _shadow(model, holder, listeners)
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
        if not listeners:
            for holder in _holders(model):
                _unshadow(holder)
            _listeners.pop(model, None)


def _holders(model: Any) -> list[Any]:
    """The model, and the transformers model inside a bridge, whose own `generate` may be called as well."""
    inner = getattr(model, "original_model", None)
    return [model] if inner is None or inner is model else [model, inner]


def _shadow(model: Any, holder: Any, listeners: list[Listener]) -> None:
    for name in _NAMES:
        if name in vars(holder):  # the user's own: theirs is called, not replaced
            continue
        method = getattr(type(holder), name, None)
        if method is None:
            continue
        bound = method.__get__(holder)
        wrap = _told_stream if name == "generate_stream" else _told
        vars(holder)[name] = _Shadow(method, holder, name, wrap(model, holder, bound, listeners))


def _unshadow(holder: Any) -> None:
    for name in _NAMES:
        if isinstance(vars(holder).get(name), _Shadow):
            del vars(holder)[name]


class _Shadow:
    """Stands in for a method on one model. A copy of the model gets the method itself, bound to the copy."""

    def __init__(self, method: Callable[..., Any], holder: Any, name: str, told: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self.__wrapped__ = method.__get__(holder)
        self._method, self._holder, self._name, self._told = method, holder, name, told

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._told(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._method.__get__(memo.get(id(self._holder), self._holder))

    def __reduce__(self) -> Any:
        return getattr, (self._holder, self._name)


@contextmanager
def _telling(
    model: Any,
    holder: Any,
    method: Callable[..., Any],
    listeners: list[Listener],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[list[Any]]:
    """Around one generate; what is put into the list is told as its output. One inside another is not told."""
    output: list[Any] = []
    if model in _running:
        yield output
        return
    generation = _generation(model, holder, method, args, kwargs)
    told = list(listeners)
    _running.add(model)
    try:
        for listener in told:
            listener.on_generate(generation)
        yield output
    finally:  # also when a stream is abandoned half way
        _running.discard(model)
        for listener in told:
            listener.on_generate_end(output[0] if output else None)


def _told(model: Any, holder: Any, method: Callable[..., Any], listeners: list[Listener]) -> Callable[..., Any]:
    def generate(*args: Any, **kwargs: Any) -> Any:
        with _telling(model, holder, method, listeners, args, kwargs) as output:
            output.append(method(*args, **kwargs))
            return output[0]

    return generate


def _told_stream(model: Any, holder: Any, method: Callable[..., Any], listeners: list[Listener]) -> Callable[..., Any]:
    def generate_stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with _telling(model, holder, method, listeners, args, kwargs):
            yield from method(*args, **kwargs)

    return generate_stream


def _generation(
    model: Any, holder: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Generation:
    given = _arguments(method, args, kwargs)
    # the loop of transformers reads settings that TransformerLens's own loop does not
    of_transformers = method.__name__ == "hf_generate" or holder is not model or not hasattr(model, "hook_dict")
    config = getattr(getattr(model, "original_model", model), "generation_config", None)
    configs = [given.get("generation_config"), config] if of_transformers else []
    _refuse_beams(given, configs)
    _refuse_drafts(given, configs)
    stop: tuple[int, ...] = ()
    # in the loop of transformers, a None that is given means that nothing ends the text
    endless = of_transformers and "eos_token_id" in kwargs and kwargs["eos_token_id"] is None
    if given.get("stop_at_eos", True) and not endless:
        if method.__name__ == "hf_generate":
            holders = [getattr(model, "tokenizer", None), *configs]
        elif of_transformers:
            holders = configs
        else:
            holders = [getattr(model, "cfg", None), getattr(model, "tokenizer", None)]
        stop = _ids(given.get("eos_token_id")) or next(filter(None, map(_eos_of, holders)), ())
    prompt = next((given[name] for name in ("input", "input_ids", "inputs") if given.get(name) is not None), None)
    if prompt is None and args:
        prompt = args[0]
    return Generation(
        stop_tokens=stop,
        max_forwards=given.get("max_new_tokens"),
        looks_back=bool(given.get("return_cache", False)),
        prompt_slots=prompt.shape[1] if isinstance(prompt, Tensor) and prompt.ndim == 2 else 0,
        masked=given.get("attention_mask") is not None,
        own_criteria=any(given.get(name) for name in ("stopping_criteria", "stop_strings")),
    )


def _refuse_beams(given: dict[str, Any], configs: list[Any]) -> None:
    beams = given.get("num_beams")
    if beams is None:
        beams = next((c.num_beams for c in configs if getattr(c, "num_beams", None) is not None), 1)
    if beams > 1:
        raise ValueError(
            f"beam search (num_beams={beams}) reorders its hypotheses at every step, so no row belongs to a sequence "
            "for good: generate with num_beams=1 under a probe, or score the finished text."
        )


def _refuse_drafts(given: dict[str, Any], configs: list[Any]) -> None:
    """Forwards whose tokens may be thrown away, or that are not of the text."""

    def setting(name: str) -> Any:
        return next((v for v in (given.get(name), *(getattr(c, name, None) for c in configs)) if v is not None), None)

    drafts = [n for n in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit") if setting(n)]
    if drafts:
        raise ValueError(
            f"assisted decoding ({drafts[0]}) reads drafts that may be thrown away, so what passes is not the text: "
            "generate without it under a probe."
        )
    if (setting("guidance_scale") or 1) != 1:
        raise ValueError(
            "guidance_scale runs a second, unconditional forward at every step, which is not the text: generate "
            "without it under a probe."
        )


def _eos_of(holder: Any) -> tuple[int, ...]:
    return _ids(getattr(holder, "eos_token_id", None))


def _arguments(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(parameter.name, {}))
    return given


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)
