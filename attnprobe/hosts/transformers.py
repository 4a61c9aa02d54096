"""Plain transformers models: attention is seen through the library's own attention interface.

The models look their attention function up by the name in their configuration. While a probe watches, the name is
one of ours: a function that calls the model's own and passes on what it was given, queries and keys after the rotary
embedding, so that nothing [query, key] is ever made. A model on eager attention makes patterns anyway, and those are
passed on as they are.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.hosts.base import HOOKS, Attention, Listener, Replace, Site
from attnprobe.hosts.calls import listen_to_module
from attnprobe.hosts.generation import listen_to_generate
from attnprobe.hosts.replacing import Replacement, placed, replaced

_PREFIX = "attnprobe_"
# Implementations whose arithmetic is known to be softmax(scaling q k^T) under a mask that can be looked at.
_SEEN = ("sdpa", "eager")
# What an analyzer may ask for here.
_PARTS = ("pattern", "z", "v")


class TransformersHost:
    """A `PreTrainedModel`: a decoder whose attention goes through `AttentionInterface`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._modules: dict[Site, Any] = {}
        for path, module in model.named_modules():
            if _is_causal_attention(module):
                site = Site(name=f"blocks.{module.layer_idx}.attn", stack="blocks", layer=int(module.layer_idx))
                if site in self._modules:  # a second decoder in the model goes by its own path
                    site = Site(name=path, stack=path.split(".")[0], layer=site.layer)
                self._modules[site] = module

    @property
    def n_layers(self) -> int | None:
        return getattr(self._config, "num_hidden_layers", None)

    @property
    def n_heads(self) -> int | None:
        heads = getattr(self._config, "num_attention_heads", None)
        return heads if isinstance(heads, int) else None

    @property
    def pad_token(self) -> int | None:
        tokenizer = getattr(self.model, "tokenizer", None)
        return getattr(tokenizer if tokenizer is not None else self.model.config, "pad_token_id", None)

    @property
    def vocabulary(self) -> int | None:
        return getattr(self._config, "vocab_size", None)

    @property
    def context(self) -> int | None:
        return getattr(self._config, "max_position_embeddings", None)

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config()

    def unembedding(self) -> Tensor:
        head = self.model.get_output_embeddings()
        if head is None:
            raise ValueError("the measure 'unembedding' needs an unembedding matrix, and this model shows none.")
        weight: Any = head.weight() if callable(head.weight) else head.weight  # a quantised layer packs it
        if weight.is_meta:
            raise ValueError("the measure 'unembedding' reads the unembedding matrix, and this model's is offloaded.")
        unpacked: Tensor = weight.dequantize() if weight.is_quantized else weight
        return unpacked

    def sites(self, select: str | Callable[[str], bool]) -> list[Site]:
        matches = select if callable(select) else (lambda name: fnmatch.fnmatchcase(name, select))
        names = {f"{site.name}.{HOOKS['pattern']}": site for site in self._modules}
        chosen = [site for name, site in names.items() if matches(name)]
        if not names:
            raise ValueError(
                f"{type(self.model).__name__} has no causal self-attention that goes through the attention interface "
                "of transformers, so there is nothing to watch; attnprobe.load_model(model) may make a "
                "TransformerBridge of it."
            )
        if not chosen:
            near = difflib.get_close_matches(str(select), names, n=3, cutoff=0.0)
            raise ValueError(
                f"{select!r} matches no attention of this model; near it: {', '.join(near)}. A plain transformers "
                "model shows the self-attention of its decoder only; a TransformerBridge shows more."
            )
        return sorted(chosen, key=lambda site: site.layer)

    def decode(self, tokens: Tensor, mask: Tensor, cache: Any, keep: int) -> tuple[Tensor, Any]:
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise TypeError("answers are scored on decoder-only models; this one has an encoder.")
        given: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        takes = inspect.signature(self.model.forward).parameters
        if "position_ids" in takes:  # a model of absolute positions would count padding
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        if "logits_to_keep" in takes:
            given["logits_to_keep"] = keep
        output = self.model(input_ids=tokens, **given)
        return output.logits, output.past_key_values

    def why_silent(self, site: Site) -> str:
        config: Any = self._modules[site].config
        if not str(config._attn_implementation).startswith(_PREFIX):
            return (
                f"the model's attention implementation was set to {config._attn_implementation!r} after the probe "
                "was attached or the ablation begun: leave and enter again"
            )
        return (
            "its attention did not go through the attention interface of transformers (a TransformerBridge that was "
            "made of this model has taken it over: attach to the bridge)"
        )

    @contextmanager
    def watch(self, listener: Listener, sites: Sequence[Site], parts: Sequence[str], *, logits: bool) -> Iterator[None]:
        unknown = sorted(set(parts) - set(_PARTS))
        if unknown:
            raise ValueError(
                f"an analyzer needs {', '.join(unknown)}, and a plain transformers model shows its attention function "
                "only: pattern, z and v. Load the model as a TransformerBridge (attnprobe.load_model) for the rest."
            )
        running: list[bool] = []  # not empty while a forward of the model runs
        with ExitStack() as stack:
            for site in sites:
                module = self._modules[site]
                stack.enter_context(_watching(module, _Ear(listener, site, tuple(parts), running)))
            begin, end = (lambda: running.append(True)), running.clear
            for handle in listen_to_module(self.model, listener, begin, end, logits=logits):
                stack.callback(handle.remove)
            stack.enter_context(listen_to_generate(self.model, listener))
            yield

    @contextmanager
    def replace_outputs(self, sites: Sequence[Site], replace: Replace, *, values: bool = False) -> Iterator[None]:
        replacement = Replacement(replace, sites, self.why_silent)
        with ExitStack() as stack:
            for site in sites:
                module = self._modules[site]
                stack.enter_context(placed(module, site, replacement, functools.partial(_interposed, module)))
            for handle in listen_to_module(self.model, replacement, lambda: None, logits=False):
                stack.callback(handle.remove)
            yield


class _Name(str):
    """The name of ours in a configuration; a copy of the configuration gets the model's own."""

    def __new__(cls, own: str) -> _Name:
        return super().__new__(cls, _PREFIX + own)

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.removeprefix(_PREFIX)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.removeprefix(_PREFIX),)


def _is_causal_attention(module: nn.Module) -> bool:
    """By what the library's attention modules have in common."""
    return (
        "Attention" in type(module).__name__
        and isinstance(getattr(module, "layer_idx", None), int)
        and getattr(module, "is_causal", False) is True
        and not getattr(module, "is_cross_attention", False)
        and hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
        and hasattr(getattr(module, "config", None), "_attn_implementation_internal")
    )


@dataclass(frozen=True)
class _Ear:
    """Who listens at which site, and for what."""

    listener: Listener
    site: Site
    parts: tuple[str, ...]
    running: list[bool]

    @property
    def open(self) -> bool:
        """Whether to listen now: not while a backward pass computes attention again."""
        if self.running:
            return True
        if torch._C._current_graph_task_id() == -1:
            raise ValueError(
                f"{self.site.name} was computed outside a forward of the model that the probe is attached to: call "
                "that model itself rather than a part of it, or attach to what you call."
            )
        return False


# Which ears an attention module has, and how many contexts of ours a configuration serves.
_ears: weakref.WeakKeyDictionary[nn.Module, list[_Ear]] = weakref.WeakKeyDictionary()
_served: dict[int, tuple[Any, str, int]] = {}


@contextmanager
def _watching(module: Any, ear: _Ear) -> Iterator[None]:
    """One more ear at a module."""
    with _interposed(module):
        ears = _ears.setdefault(module, [])
        ears.append(ear)
        try:
            yield
        finally:
            ears.remove(ear)
            if not ears:
                _ears.pop(module, None)


@contextmanager
def _interposed(module: Any) -> Iterator[None]:
    """The first one of a configuration changes its attention to ours, the last one back."""
    config = module.config
    own = str(config._attn_implementation)
    _, served, count = _served.get(id(config), (config, own, 0))
    if own.startswith(_PREFIX):  # another probe is here, or it was when the model was copied
        own = served.removeprefix(_PREFIX)
    name = _registered(own, module)
    _served[id(config)] = (config, own, count + 1)
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        _, own, count = _served.pop(id(config))
        if count > 1:
            _served[id(config)] = (config, own, count - 1)
        elif str(config._attn_implementation).startswith(_PREFIX):  # else the user has set another since: theirs stays
            config._attn_implementation_internal = own


def _registered(own: str, module: nn.Module) -> str:
    """The name under which the model's own implementation goes through our ears."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if own not in _SEEN:
        raise ValueError(
            f"this model computes attention by {own!r}, which shows no mask that can be understood: call "
            "model.set_attn_implementation('sdpa') first."
        )
    if getattr(module, "reorder_and_upcast_attn", False):
        raise ValueError(
            f"{type(module).__name__} with reorder_and_upcast_attn asks for its attention by name, and would compute "
            "it otherwise under a probe: load the model as a TransformerBridge (attnprobe.load_model)."
        )
    if own == "eager":
        _eager_of(module)  # raises where there is none
    name = _Name(own)
    AttentionInterface.register(name, _heard_eager if own == "eager" else _heard_sdpa)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    return name


def _is_open(ear: _Ear) -> bool:
    return ear.open


@torch.compiler.disable
def _heard_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    for ear in filter(_is_open, _ears.get(module, ())):
        _refuse_what_is_not_softmax(ear.site, given)
        scaling = given.get("scaling")
        ear.listener.on_attention(
            ear.site,
            Attention(
                q=query,
                k=key,
                v=value,
                z=output,
                scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                window=given.get("sliding_window"),
                mask=attention_mask,
            ),
        )
    return replaced(module, output, value), weights


@torch.compiler.disable
def _heard_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, Any]:
    output, weights = _eager_of(module)(module, query, key, value, attention_mask, **given)
    for ear in filter(_is_open, _ears.get(module, ())):
        passed = {"pattern": weights, "z": output, "v": value.transpose(1, 2)}
        for part in ear.parts:
            ear.listener.on_part(ear.site, part, passed[part])
    return replaced(module, output, value), weights


def _eager_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The eager attention of the file that defines the module."""
    found: Callable[..., tuple[Tensor, Tensor]] | None = getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", None
    )
    if found is None:
        raise ValueError(
            f"{type(module).__name__} keeps its eager attention to itself: call model.set_attn_implementation('sdpa'), "
            "or load the model as a TransformerBridge (attnprobe.load_model)."
        )
    return found


def _refuse_what_is_not_softmax(site: Site, given: dict[str, Any]) -> None:
    """Attention that is more than softmax(scaling q k^T) over causal keys would have another pattern."""
    if given.get("dropout"):
        raise ValueError(f"{site.name} drops attention weights (train mode): call model.eval() first.")
    more = [name for name in ("position_bias", "s_aux", "softcap") if given.get(name) is not None]
    if more or given.get("is_causal") is False:
        raise ValueError(
            f"{site.name} computes attention with {' and '.join(more) or 'is_causal=False'}, which queries and keys "
            "alone do not show: call model.set_attn_implementation('eager'), or load it as a TransformerBridge."
        )
