"""TransformerLens models: TransformerBridge, HookedTransformer, any HookedRootModule with the named hooks.

They are told apart by what they offer:

- a bridge has `original_model`, a torch module whose forward has the tokens, the mask and the cache as arguments;
- a HookedTransformer has `blocks`, each called with the mask and its cache entry, and an `embed` that sees tokens;
- any other module is asked for the `attention_mask` its own forward was given, if it was.

Hooks go in as permanent ones under a level of their own, so that `reset_hooks`, `hooks(...)` and `run_with_cache` of
the user do not take them away, and come out by that level, so that the user's hooks stay.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.hosts.base import HOOKS, Call, CallListener, HeadOutputs, Listener, Replace, Site, Stream
from attnprobe.hosts.calls import listen_to_module
from attnprobe.hosts.generation import listen_to_generate
from attnprobe.hosts.replacing import Replacement, placed, replaced

# TransformerLens counts nested contexts with small positive levels; ours never meet them.
_FIRST_LEVEL = 1_000_000
_levels = itertools.count(-_FIRST_LEVEL, -1)
_late_levels = itertools.count(_FIRST_LEVEL)


class HookedHost:
    """A model with `hook_dict`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._hooks: dict[str, Any] = dict(model.hook_dict)

    @property
    def n_layers(self) -> int | None:
        return getattr(getattr(self.model, "cfg", None), "n_layers", None)

    @property
    def n_heads(self) -> int | None:
        return getattr(getattr(self.model, "cfg", None), "n_heads", None)

    @property
    def pad_token(self) -> int | None:
        return getattr(getattr(self.model, "tokenizer", None), "pad_token_id", None)

    @property
    def vocabulary(self) -> int | None:
        return getattr(getattr(self.model, "cfg", None), "d_vocab", None)

    @property
    def context(self) -> int | None:
        return getattr(getattr(self.model, "cfg", None), "n_ctx", None)

    def unembedding(self) -> Tensor:
        output_embeddings: Any = getattr(_original_model(self.model), "get_output_embeddings", lambda: None)()
        if output_embeddings is not None:
            weight: Tensor = output_embeddings.weight
            return weight
        w_u: Tensor | None = getattr(self.model, "W_U", None)
        if w_u is None:
            raise ValueError("the measure 'unembedding' needs an unembedding matrix, and this model shows none.")
        return w_u.T

    def sites(self, select: str | Callable[[str], bool]) -> list[Site]:
        matches = select if callable(select) else (lambda name: fnmatch.fnmatchcase(name, select))
        names = [name for name in self._hooks if name.endswith("." + HOOKS["pattern"])]
        chosen = [name for name in names if matches(name)]
        if not chosen:
            raise ValueError(_nothing_matches(select, names))
        return sorted((self._site(name) for name in chosen), key=lambda site: (site.stack, site.layer, site.name))

    def decode(self, tokens: Tensor, mask: Tensor, cache: Any, keep: int) -> tuple[Tensor, Any]:
        original = _original_model(self.model)
        if original is not None:
            if getattr(getattr(original, "config", None), "is_encoder_decoder", False) or self._bidirectional:
                raise TypeError("answers are scored on decoder-only models; this one has an encoder.")
            extra = {"logits_to_keep": keep} if _takes(original, "logits_to_keep") else {}
            logits, cache = self.model(
                tokens,
                return_type="logits_and_cache",
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **extra,
            )
            return logits, cache
        if not hasattr(self.model, "blocks") or not hasattr(self.model, "cfg"):
            raise TypeError(
                f"answers are scored on a TransformerBridge or HookedTransformer; {type(self.model).__name__} has no "
                "key/value cache to decode with."
            )
        if cache is None:
            cache = _hooked_transformer_cache(self.model, tokens.shape[0])
        # this host keeps the mask of past tokens in its cache
        new = mask[:, -tokens.shape[1] :]
        return self.model.forward(tokens, return_type="logits", past_kv_cache=cache, attention_mask=new), cache

    def why_silent(self, site: Site) -> str:
        return (
            "the hooks exist and did not fire. Attention computed by sdpa fires no pattern hook (use eager attention), "
            "and a forward that stops early never reaches later layers"
        )

    @contextmanager
    def watch(self, listener: Listener, sites: Sequence[Site], parts: Sequence[str], *, logits: bool) -> Iterator[None]:
        level = next(_levels)
        with ExitStack() as stack:
            ours = []
            for site in sites:
                for part in parts:
                    point, report = self._hook_point(site, part), _reporter(listener, site, part)
                    stack.callback(_remove, point, level)
                    point.add_hook(report, is_permanent=True, level=level)
                    ours.append((point, report))

            def go_last() -> None:
                """The model uses what the last hook leaves: ours look after the user's, however late those came."""
                for point, report in ours:
                    if point.fwd_hooks and not _is_a_probe(point.fwd_hooks[-1]):
                        _remove(point, level)
                        point.add_hook(report, is_permanent=True, level=level)

            for handle in self._listen_to_calls(listener, go_last, logits=logits):
                stack.callback(handle.remove)
            stack.enter_context(listen_to_generate(self.model, listener))
            yield

    @contextmanager
    def replace_outputs(self, sites: Sequence[Site], replace: Replace, *, values: bool = False) -> Iterator[None]:
        new: dict[Site, Tensor] = {}
        entries: dict[Site, Any] = {}

        def with_values(outputs: HeadOutputs) -> Tensor:
            if values:
                passed = new.pop(outputs.site, None), entries.pop(outputs.site, None)
                outputs = dataclasses.replace(outputs, v=_values(outputs, *passed))
            return replace(outputs)

        replacement = Replacement(with_values, sites, self.why_silent)
        with ExitStack() as stack:
            for site in sites:
                if values:
                    keep = functools.partial(_keep, new, site)
                    stack.enter_context(_hooked_last(self._hook_point(site, "v"), keep))
                    stack.callback(self._keep_entry(site, entries))
                point = self._hook_point(site, "z")
                go_on = functools.partial(_hooked_last, point, functools.partial(_go_on, point))
                stack.enter_context(placed(point, site, replacement, go_on))
            for handle in self._listen_to_calls(replacement, lambda: None, logits=False):
                stack.callback(handle.remove)
            yield

    def _keep_entry(self, site: Site, entries: dict[Site, Any]) -> Callable[[], None]:
        """Note the cache entry that the site's block of a HookedTransformer is given; the return value ends it."""
        blocks = getattr(self.model, "blocks", None)
        if _original_model(self.model) is not None or not isinstance(blocks, nn.ModuleList):
            return lambda: None

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entries[site] = kwargs.get("past_kv_cache_entry")

        remove: Callable[[], None] = blocks[site.layer].register_forward_pre_hook(keep, with_kwargs=True).remove
        return remove

    def _listen_to_calls(self, listener: CallListener, go_last: Callable[[], None], *, logits: bool) -> list[Any]:
        original = _original_model(self.model)
        if original is not None:
            return listen_to_module(original, listener, go_last, logits=logits)
        blocks = getattr(self.model, "blocks", None)
        if isinstance(blocks, nn.ModuleList) and hasattr(self.model, "embed"):
            return _listen_to_blocks(self.model, blocks, listener, go_last, logits=logits)
        return listen_to_module(self.model, listener, go_last, logits=logits)

    def _site(self, hook_name: str) -> Site:
        name = hook_name[: -len(HOOKS["pattern"]) - 1]
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        stack = name[: number.start()].strip(".") if number else name
        if "cross" in name[len(stack) :]:
            kind = "cross"
        elif "encoder" in stack or self._bidirectional:
            kind = "bidirectional"
        else:
            kind = "causal"
        return Site(name=name, stack=stack, layer=int(number.group(1)) if number else 0, kind=kind)

    @property
    def _bidirectional(self) -> bool:
        cfg = getattr(self.model, "cfg", None)
        if getattr(cfg, "attention_dir", None) == "bidirectional":
            return True
        config = getattr(_original_model(self.model), "config", None)
        return getattr(config, "model_type", "") in _ENCODER_ONLY and not getattr(config, "is_decoder", False)

    def _hook_point(self, site: Site, part: str) -> Any:
        name = f"{site.name}.{HOOKS[part]}"
        if name not in self._hooks:
            near = difflib.get_close_matches(name, self._hooks, n=3, cutoff=0.6)
            raise ValueError(
                f"{site.name} has no hook {HOOKS[part]!r}, which an analyzer needs (part {part!r})"
                + (f"; near it: {', '.join(near)}." if near else ".")
            )
        return self._hooks[name]


def _takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(module.forward).parameters


def _hooked_transformer_cache(model: Any, batch: int) -> Any:
    module = importlib.import_module("transformer_lens")
    kind = getattr(module, "TransformerLensKeyValueCache", None) or module.HookedTransformerKeyValueCache
    return kind.init_cache(model.cfg, model.cfg.device, batch)


_ENCODER_ONLY = frozenset({"bert", "roberta", "distilbert", "albert", "electra", "modernbert", "xlm-roberta"})


def _original_model(model: Any) -> nn.Module | None:
    try:
        original = model.original_model
    except AttributeError:
        return None
    return original if isinstance(original, nn.Module) else None


def _is_a_probe(handle: Any) -> bool:
    return handle.context_level is not None and handle.context_level <= -_FIRST_LEVEL


def _remove(point: Any, level: int) -> None:
    """Take out the hooks of one level. (`remove_hooks(including_permanent=True)` of 3.9 takes the user's with them.)"""
    for handle in [handle for handle in point.fwd_hooks if handle.context_level == level]:
        handle.hook.remove()
        point.fwd_hooks.remove(handle)


@contextmanager
def _hooked_last(point: Any, hook: Callable[..., Any]) -> Iterator[None]:
    """A hook that comes after all others of its point, probes among them, however late those came."""
    level = next(_late_levels)
    point.add_hook(hook, is_permanent=True, level=level)
    ours = point.fwd_hooks[-1].hook

    def go_last(*_: Any) -> None:
        if ours.id in point._forward_hooks:
            point._forward_hooks.move_to_end(ours.id)

    handle = point.register_forward_pre_hook(go_last)
    try:
        yield
    finally:
        handle.remove()
        _remove(point, level)


def _keep(new: dict[Site, Tensor], site: Site, value: Tensor, hook: Any) -> None:
    new[site] = value


def _go_on(point: Any, value: Tensor, hook: Any) -> Tensor:
    return replaced(point, value)


def _values(outputs: HeadOutputs, new: Tensor | None, entry: Any) -> Tensor | None:
    """Values [batch, kv_head, key, d] of the keys of a forward: the new ones, or all that its cache holds by now.

    Args:
        entry: what a HookedTransformer keeps of this layer in place of a cache of all.
    """
    stream = outputs.stream
    if new is None or new.ndim != 4 or stream is None or stream.past is None:
        return None
    if stream.past == 0:
        return new.transpose(1, 2)
    if entry is not None:
        kept: Tensor = entry.past_values
        return kept.transpose(1, 2)
    layers = getattr(stream.cache, "layers", ())
    return getattr(layers[outputs.site.layer], "values", None) if outputs.site.layer < len(layers) else None


def _reporter(listener: Listener, site: Site, part: str) -> Callable[..., None]:
    def report(value: Tensor, hook: Any) -> None:  # a hook that returned anything would replace the activation
        listener.on_part(site, part, value)

    return report


def _nothing_matches(select: str | Callable[[str], bool], names: list[str]) -> str:
    if not names:
        return "this model has no attention pattern hook (`hook_pattern`) at all, so there is nothing to watch."
    what = repr(select) if isinstance(select, str) else "the given predicate"
    near = difflib.get_close_matches(select, names, n=3, cutoff=0.0) if isinstance(select, str) else names[:3]
    return (
        f"{what} matches none of the {len(names)} pattern hooks of this model; near it: {', '.join(near)}. "
        "Patterns are globs such as 'blocks.*.attn.hook_pattern'."
    )


def _listen_to_blocks(
    model: Any, blocks: nn.ModuleList, listener: CallListener, go_last: Callable[[], None], *, logits: bool
) -> list[Any]:
    """A HookedTransformer: its `generate` calls `forward` directly, so the blocks are listened to instead."""
    embedded: list[Tensor] = []
    caches: list[Any] = []

    def embed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        embedded[:] = [args[0] if args else kwargs["tokens"]]

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        go_last()
        n_new = args[0].shape[1]
        tokens = embedded[0][:, -n_new:] if embedded and embedded[0].ndim == 2 else None
        entry = kwargs.get("past_kv_cache_entry")
        past = 0 if entry is None else entry.past_keys.shape[1]
        caches[:] = [entry]
        listener.on_call(Call(decoder=Stream(tokens, kwargs.get("attention_mask"), past, entry)))

    def after(*_: Any) -> None:
        listener.on_call_end(caches[0] if caches else None)

    def unembed(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        cap = getattr(model.cfg, "output_logits_soft_cap", -1.0) or -1.0
        listener.on_logits(cap * torch.tanh(output / cap) if cap > 0 else output)

    handles = [
        model.embed.register_forward_hook(embed, with_kwargs=True),
        blocks[0].register_forward_pre_hook(before, with_kwargs=True),
        blocks[-1].register_forward_hook(after),
    ]
    if logits:
        handles.append(model.unembed.register_forward_hook(unembed))
    return handles
