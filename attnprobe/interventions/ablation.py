"""Ablating heads: what a head says is replaced by nothing, by its mean, or by what it would say of the first token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.hosts import HeadOutputs, Host, Site, host_of
from attnprobe.hosts.base import Replace
from attnprobe.interventions.heads import heads_by_site
from attnprobe.interventions.means import head_means

MODES = ("mean", "zero", "sink")


def ablate(
    model: Any,
    heads: Sequence[tuple[int, int]],
    mode: Literal["mean", "zero", "sink"] = "mean",
    *,
    reference: Any = None,
) -> AbstractContextManager[None]:
    """Ablate heads of a model while the context is open, in forwards and in `generate`, with or without a cache.

    A head's output z [batch, query, head, d] is replaced on its way to the output projection, at every token:

    - "zero": by zero.
    - "mean": by its mean over other text. A mean over the rows of the text itself would tell a token about later ones.
    - "sink": by v_0, the value of the sequence's first token: the output of a head whose rows are all sink.

    Whoever watches a head, a `Probe` or a hook, sees what the head computed, before it is replaced. Ablations nest;
    where two name a head, the inner one holds. Biases of the output projection stay.

    Args:
        model: TransformerBridge, HookedTransformer, or a transformers model that computes attention by sdpa or eager.
        heads: (layer, head) pairs, counted from 0; an empty list ablates nothing.
        mode: "mean", "zero" or "sink".
        reference: for "mean": texts or token-id lists whose mean is taken now, under whatever ablation is open, or
            the means themselves, [layer, head, d] as `head_means` gives them.

    Returns:
        A context manager. The model is left as it was found, also after an exception.

    Raises:
        TypeError, ValueError: heads, mode or reference that mean nothing for this model, in one sentence. In a forward:
            "sink" where v_0 is not to be had (a sliding window that has dropped the first token), or where the first
            row of a head is not v_0 (gated attention, a softmax with a sink of its own).

    Example::

        with attnprobe.ablate(model, [(3, 0), (3, 4)], mode="zero"):
            model.generate(ids, max_new_tokens=20)

    >>> import torch, transformers, attnprobe as ap
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    ... )
    >>> model, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(5)[None]
    >>> before = model(ids).logits
    >>> with ap.ablate(model, [(0, 1)], mode="zero"):
    ...     print(torch.equal(model(ids).logits, before))
    False
    >>> torch.equal(model(ids).logits, before)
    True

    Source: mean ablation over a reference as in Wang et al., "Interpretability in the Wild" (arXiv 2211.00593), there
    by position, here over all positions.
    """
    host = host_of(model)
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: use 'mean', 'zero' or 'sink'.")
    if mode != "mean" and reference is not None:
        raise ValueError(f"reference= is for mode='mean', and mode={mode!r} needs none: leave it out.")
    by_site = heads_by_site(heads, host)
    replacements: dict[Site, Replace] = {}
    means = _means(model, host, reference) if mode == "mean" else None
    for site, chosen in by_site.items():
        if mode == "zero":
            replacements[site] = _Constant(chosen, torch.zeros(len(chosen), 1))
        elif means is not None:
            replacements[site] = _Constant(chosen, _means_of(means, site, chosen))
        else:
            replacements[site] = _Sink(site, chosen)
    return host.replace_outputs(
        list(by_site), lambda outputs: replacements[outputs.site](outputs), values=mode == "sink"
    )


class _Constant:
    """The same output at every token of every sequence: [head, d], or [head, 1] for one number."""

    def __init__(self, heads: tuple[int, ...], value: Float[Tensor, "head d"]) -> None:
        self._heads = heads
        self._value = value

    def __call__(self, outputs: HeadOutputs) -> Tensor:
        _check_heads(outputs, self._heads)
        if self._value.shape[-1] not in (1, outputs.z.shape[-1]):
            raise ValueError(
                f"the means have {self._value.shape[-1]} numbers a head and {outputs.site.name} has "
                f"{outputs.z.shape[-1]}: take head_means of this model."
            )
        self._value = self._value.to(outputs.z)
        return _with_heads(outputs.z, self._heads, self._value)


class _Sink:
    """At every token the value of the first token of its sequence."""

    def __init__(self, site: Site, heads: tuple[int, ...]) -> None:
        if site.kind != "causal":
            raise ValueError(
                f"{site.name} is {site.kind}, and mode='sink' is for causal attention: use 'zero' or 'mean'."
            )
        self._heads = heads
        self._checked = False

    def __call__(self, outputs: HeadOutputs) -> Tensor:
        _check_heads(outputs, self._heads)
        first = _first_slots(outputs)
        value = _first_values(outputs, first, self._heads)
        if not self._checked:
            self._check(outputs, first, value)
        return _with_heads(outputs.z, self._heads, value.unsqueeze(1))

    def _check(self, outputs: HeadOutputs, first: Tensor, value: Tensor) -> None:
        """The first row of causal attention sees one key: its output is v_0, or the attention is another one."""
        assert outputs.stream is not None
        row = first - (outputs.stream.past or 0)
        here = ((row >= 0) & (row < outputs.z.shape[1])).nonzero().flatten()
        if not len(here):
            return
        computed = outputs.computed[here, row[here]][:, list(self._heads)]
        gap = (computed.float() - value[here].float()).abs().amax((0, 2))
        wrong = gap > 2e-2 * value[here].float().abs().amax((0, 2)).clamp_min(1e-6)
        if bool(wrong.any()):
            raise ValueError(
                f"the first row of {outputs.site.name} is not the value of its first token (head "
                f"{self._heads[int(wrong.to(torch.int64).argmax())]} is off by {float(gap[wrong][0]):.3g}): the "
                " architecture gates or mixes head outputs, or its softmax has a sink of its own, so that mode="
                "'sink' has no meaning here; use 'zero' or 'mean'."
            )
        self._checked = True


def _with_heads(z: Tensor, heads: tuple[int, ...], value: Tensor) -> Tensor:
    ours = z.clone()
    ours[:, :, list(heads)] = value.expand(*z.shape[:2], len(heads), z.shape[-1])
    return ours


def _check_heads(outputs: HeadOutputs, heads: tuple[int, ...]) -> None:
    if outputs.z.ndim != 4:
        raise ValueError(
            f"the head outputs of {outputs.site.name} have shape {tuple(outputs.z.shape)}, not [batch, query, head, "
            "d], so no head can be told from another."
        )
    if max(heads) >= outputs.z.shape[2]:
        raise ValueError(
            f"head {max(heads)} was named and {outputs.site.name} has heads 0 to {outputs.z.shape[2] - 1}."
        )


def _first_slots(outputs: HeadOutputs) -> Tensor:
    """The slot [batch] of the first real token of every sequence."""
    stream, batch = outputs.stream, outputs.z.shape[0]
    if stream is None:
        raise ValueError(
            f"{outputs.site.name} was computed outside a forward of the ablated model, so that padding cannot be told: "
            "call that model itself rather than a part of it."
        )
    if stream.mask is None:
        return torch.zeros(batch, dtype=torch.int64, device=outputs.z.device)
    if stream.mask.ndim != 2:
        raise ValueError(
            f"an attention mask of shape {tuple(stream.mask.shape)} does not say which token is the first: pass a "
            "[batch, tokens] mask of 0 and 1 (a static cache builds such masks by itself: use a dynamic one)."
        )
    return (stream.mask > 0).to(outputs.z.device).to(torch.int64).argmax(1)


def _first_values(outputs: HeadOutputs, first: Tensor, heads: tuple[int, ...]) -> Float[Tensor, "batch head d"]:
    """v_0 of the given heads of every sequence, by the key/value heads that they read."""
    v, stream = outputs.v, outputs.stream
    assert stream is not None
    seen = outputs.z.shape[1] + (stream.past or 0)
    if v is None or v.ndim != 4 or stream.past is None or v.shape[2] < seen:
        kept = "are not shown" if v is None or v.ndim != 4 else f"are kept of {v.shape[2]} of {seen} tokens"
        raise ValueError(
            f"mode='sink' needs the value of the first token, and the values of {outputs.site.name} {kept} (a sliding "
            "window or an unknown kind of cache): run without a cache, or use 'zero' or 'mean'."
        )
    n_heads, n_kv = outputs.z.shape[2], v.shape[1]
    if n_heads % n_kv:
        raise ValueError(f"{outputs.site.name} has {n_heads} heads on {n_kv} key/value heads, which do not divide.")
    kv_head = torch.tensor(heads, device=v.device) // (n_heads // n_kv)
    batch = torch.arange(v.shape[0], device=v.device)
    return v[batch[:, None], kv_head[None, :], first[:, None]].to(outputs.z)


def _means(model: Any, host: Host, reference: Any) -> Float[Tensor, "layer head d"]:
    if reference is None:
        raise ValueError(
            "mode='mean' needs reference=: texts, token-id lists or head_means(model, texts); a mean over the text "
            "itself would tell a token about later ones."
        )
    if not (isinstance(reference, Tensor) and reference.is_floating_point()):
        return head_means(model, reference)
    n_layers, n_heads = host.n_layers, host.n_heads
    if reference.ndim != 3 or (n_layers, n_heads) != tuple(reference.shape[:2]):
        raise ValueError(
            f"the means have shape {tuple(reference.shape)}, not [layer, head, d] with {n_layers} layers and {n_heads} "
            "heads: take head_means of this model."
        )
    return reference


def _means_of(means: Tensor, site: Site, heads: tuple[int, ...]) -> Tensor:
    chosen = means[site.layer, list(heads)]
    if not bool(chosen.isfinite().all()):
        raise ValueError(f"the means of layer {site.layer} are not finite numbers: take head_means of this model.")
    return chosen
