"""What a host offers, whatever the library: attention sites, what passes there, and when a forward begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

# What can pass at a site, and the last part of the hook's name.
HOOKS = {
    "pattern": "hook_pattern",
    "z": "hook_z",
    "v": "hook_v",
    "k": "hook_k",
    "q": "hook_q",
    "scores": "hook_attn_scores",
}


@dataclass(frozen=True)
class Site:
    """One attention of the model.

    Attributes:
        name: the common prefix of its hooks, such as "blocks.3.attn".
        stack: the part before the layer number, such as "blocks" or "decoder_blocks".
        layer: layer number within the stack.
        kind: "causal" self-attention, "bidirectional" self-attention or "cross"-attention.
        side: whose tokens are the queries: "decoder" or "encoder".
    """

    name: str
    stack: str
    layer: int
    kind: str = "causal"

    def __hash__(self) -> int:  # asked at every hook, so that hashing four fields would be felt
        return hash(self.name)

    @property
    def side(self) -> str:
        return "encoder" if self.kind == "bidirectional" else "decoder"


@dataclass(frozen=True, eq=False)
class Attention:
    """What one attention computed in one forward, where the host makes no pattern: softmax(scaling q k^T).

    Attributes:
        q: [batch, head, query, d] queries after any rotary embedding.
        k, v: [batch, kv_head, key, d] keys (likewise) and values, past ones included; the last ones of a sliding cache.
        z: [batch, query, head, d] head outputs.
        scaling: what q k^T is multiplied by.
        window: how many keys a row sees at most, its own included; None for all.
        mask: [batch or 1, 1, query, key] what the host masked by, boolean or additive; None for plain causal.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    scaling: float
    window: int | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class Stream:
    """The tokens one side of a forward was given: [batch, new] ids and the mask over all slots, past ones included."""

    tokens: Tensor | None = None
    mask: Tensor | None = None
    past: int | None = None  # slots in the cache; None where the host does not say
    cache: Any = None  # the cache itself, to tell it from another one of the same length


@dataclass(frozen=True, eq=False)
class HeadOutputs:
    """What passes at one site in one forward.

    Attributes:
        site: where.
        z: [batch, query, head, d] head outputs, as earlier replacements left them.
        computed: the same, as the heads computed them.
        v: [batch, kv_head, key, d] values of the keys that the cache still has, None where they were not asked for.
        stream: tokens, mask and cache of the forward; None outside a forward of the whole model.
    """

    site: Site
    z: Tensor
    computed: Tensor
    v: Tensor | None
    stream: Stream | None


Replace = Callable[[HeadOutputs], Tensor]


@dataclass(frozen=True)
class Call:
    """One forward of the model."""

    decoder: Stream = field(default_factory=Stream)
    encoder: Stream = field(default_factory=Stream)


@dataclass(frozen=True)
class Generation:
    """One `generate` of the model: its forwards belong to the same sequences.

    Attributes:
        stop_tokens: ids after which a row of the batch runs on as padding.
        max_forwards: how many forwards generate at most.
        looks_back: after the last token, one more forward reads the finished text for a cache; it brings nothing new.
        prompt_slots: width of the prompt, padding included, where it was given as token ids; else 0.
        masked: an attention mask was given with the prompt.
        own_criteria: it also stops by criteria that cannot be seen from outside.
    """

    stop_tokens: tuple[int, ...] = ()
    max_forwards: int | None = None
    looks_back: bool = False
    prompt_slots: int = 0
    masked: bool = False
    own_criteria: bool = False


class CallListener(Protocol):
    """Who listens to the forwards of a host."""

    def on_call(self, call: Call) -> None:
        """A forward begins."""

    def on_logits(self, logits: Tensor) -> None:
        """The forward gave these next-token logits [batch, query, vocab]."""

    def on_call_end(self, cache: Any = None) -> None:
        """The forward went through; `cache` is what it leaves, where the host shows it."""


class Listener(CallListener, Protocol):
    """Who listens to a host: called in the order of events. Exceptions travel out of the model's forward."""

    def on_part(self, site: Site, part: str, value: Tensor) -> None:
        """Something passes at a site, a part being a key of `HOOKS`."""

    def on_attention(self, site: Site, attention: Attention) -> None:
        """An attention was computed at a site, without a pattern; it stands for all parts."""

    def on_generate(self, generation: Generation) -> None:
        """A `generate` begins."""

    def on_generate_end(self, output: Any) -> None:
        """The `generate` is over; `output` is what it returns, None if it raised or was abandoned."""


class Host(Protocol):
    """A model as the probe sees it."""

    model: Any

    @property
    def n_layers(self) -> int | None:
        """Number of layers, None where the model does not say."""

    @property
    def n_heads(self) -> int | None:
        """Query heads of a layer, None where the model does not say or layers differ."""

    @property
    def pad_token(self) -> int | None:
        """The padding id, None where there is none."""

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids, None where the model does not say."""

    @property
    def context(self) -> int | None:
        """How many tokens the model reads, None where it does not say."""

    def sites(self, select: str | Callable[[str], bool]) -> list[Site]:
        """The attention sites whose pattern hook matches a glob or a predicate.

        Raises:
            ValueError: none does; the sentence names near misses.
        """

    def watch(
        self, listener: Listener, sites: Sequence[Site], parts: Sequence[str], *, logits: bool
    ) -> AbstractContextManager[None]:
        """Report to the listener until the context is left, then leave the model as it was found.

        Raises:
            ValueError: a site has no hook for a part.
        """

    def replace_outputs(
        self, sites: Sequence[Site], replace: Replace, *, values: bool = False
    ) -> AbstractContextManager[None]:
        """Replace head outputs on their way to the output projection until the context is left.

        Whoever watches a site sees what its heads computed. `values` asks for values as well.

        Raises:
            ValueError: a site has no such hooks; in the model's forward, no outputs passed at a site.
        """

    def why_silent(self, site: Site) -> str:
        """What may be the matter where a watched site did not report in a forward, and what to do."""

    def unembedding(self) -> Tensor:
        """The unembedding matrix [vocab, d_model]."""

    def decode(self, tokens: Tensor, mask: Tensor, cache: Any, keep: int) -> tuple[Tensor, Any]:
        """One forward of a decoder on new tokens [batch, new].

        Args:
            mask: [batch, seen + new] 1 for real tokens, past ones included.
            cache: what the last call returned, None at first.
            keep: logits of the last `keep` tokens suffice.

        Returns:
            Logits [batch, keep or more, vocab] and the cache.

        Raises:
            TypeError: the model is no decoder that can be driven token by token.
        """
