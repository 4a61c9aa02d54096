"""The probe: what to watch, attaching to a model, and what was found."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.hosts import Attention, Call, Generation, Host, Site, host_of
from attnprobe.leverage import leverage_of
from attnprobe.probe_settings import (
    DEFAULT_PATTERN,
    check_analyzers,
    check_heads,
    check_layers,
    check_prompt_lengths,
    named_layers,
    parts_of,
    ranges,
)
from attnprobe.results import Batch, dataset_of
from attnprobe.row_policy import check_policy
from attnprobe.sequences import Plan, Sequences, check_past
from attnprobe.stream import SiteStream
from attnprobe.token_trace import TokenTrace

if TYPE_CHECKING:
    import xarray as xr


class Probe:
    """Streams the attention rows of a model to analyzers while it reads and generates.

    Args:
        analyzers: what to compute on every watched head.
        layers: "all" (default), "middle" (L//3 to ceil(2L/3) inclusive), "center" (L//2), or a list of layer numbers.
        heads: "all" (default) or a list of head numbers.
        pattern: which attention: a glob over pattern hooks or a predicate on their names; the default watches
            self-attention of a decoder, "blocks.*.attn.hook_pattern".
        rows: what to do with rows that do not sum to 1: "error" (default), "renormalize", or "sink", which gives the
            missing mass to a key that is not a token (models whose softmax has a sink, such as GPT-OSS).
        logits: also keep the log-probability and entropy of the tokens, for uncertainty scores.

    A probe follows one model in one thread. Every call of the model starts new sequences; one `generate`, or a forward
    that goes on from a cache, continues them. Prompts in several cached chunks are one prompt. A batch may be padded on
    either side, with its attention mask; padding is not part of a sequence, and every sequence gets the numbers it gets
    alone.

    Raises:
        ValueError, TypeError: a wrong argument, in one sentence.

    >>> import attnprobe as ap
    >>> probe = ap.Probe([ap.IntrinsicTDO(), ap.TransportCapacity()], layers="middle")
    >>> probe
    Probe([IntrinsicTDO, TransportCapacity], layers='middle', heads='all')
    """

    def __init__(
        self,
        analyzers: Iterable[Analyzer],
        *,
        layers: str | Sequence[int] = "all",
        heads: str | Sequence[int] = "all",
        pattern: str | Callable[[str], bool] = DEFAULT_PATTERN,
        rows: str = "error",
        logits: bool = False,
    ) -> None:
        self.analyzers = check_analyzers(analyzers)
        self.layers = check_layers(layers)
        self.heads = check_heads(heads)
        if not isinstance(pattern, str) and not callable(pattern):
            raise TypeError(f"pattern={pattern!r}: give a glob such as {DEFAULT_PATTERN!r}, or a predicate on names.")
        self.pattern = pattern
        self.rows = check_policy(rows)
        self.logits = logits
        self._parts = parts_of(self.analyzers)
        self._host: Host | None = None
        self._stack = ExitStack()
        self._depth = 0
        self._sites: list[Site] = []
        self._n_layers = 0
        self._attention_layers: list[int] = []
        self._prompt_lengths: tuple[int, ...] | None = None
        self._batches: list[Batch] = []
        self._leverage: Tensor | None = None
        self._vocabulary: int | None = None
        self._generation: Generation | None = None
        self._generation_started = False
        self._verified: set[Site] = set()
        self._call: Call | None = None
        self._entered_late = False
        self._plans: dict[str, Plan] = {}
        self._arrived: dict[Site, dict[str, Tensor]] = {}
        self._done: set[Site] = set()
        self._sides: dict[str, Sequences] = {}
        self._streams: dict[Site, SiteStream] = {}
        self._tokens = TokenTrace()

    # -- attaching ------------------------------------------------------------------------------------------

    def attach(self, model: Any, *, prompt_lengths: int | Sequence[int] | None = None) -> Probe:
        """Attach to a model; use as a context manager, or call `detach` later.

        Args:
            model: TransformerBridge, HookedTransformer or any HookedRootModule with the named hooks.
            prompt_lengths: tokens of each sequence before the steps of the traces begin, for text that is read rather
                than generated; by default all that one forward reads is prompt. 1 traces every token of a text.

        Attaching again to the same model is counted; the probe leaves with the last `detach`.

        Raises:
            ValueError: no such layers, no hook matches, or the probe is attached to another model.
            TypeError: not a model with named hooks.
        """
        if self._host is not None and self._host.model is not model:
            raise ValueError("this probe is attached to another model: detach it first, or make a second probe.")
        if self._host is None:
            self._attach(host_of(model), prompt_lengths)
        elif prompt_lengths is not None and check_prompt_lengths(prompt_lengths) != self._prompt_lengths:
            raise ValueError("the probe is attached already, with other prompt_lengths: detach it first.")
        self._depth += 1
        return self

    def detach(self) -> None:
        """Leave the model as it was found. What was collected stays until `reset`."""
        self._detach(quiet=False)

    def _detach(self, *, quiet: bool) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth > 0 or self._host is None:
            return
        self._host = None
        self._generation = None
        self._stack.close()  # first of all: nothing below may leave hooks behind
        if self._call is not None:
            self._abandon(quiet=quiet)

    def __enter__(self) -> Probe:
        if self._host is None:
            raise ValueError("the probe is attached to no model: write `with probe.attach(model):`.")
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._detach(quiet=kind is not None)  # an exception on its way says it all

    def reset(self) -> None:
        """Forget every sequence collected so far."""
        self._batches = []
        self._forget_current()

    def _attach(self, host: Host, prompt_lengths: int | Sequence[int] | None) -> None:
        sites = self._select_layers(host.sites(self.pattern), host)
        self._finish()  # the last attachment's sequences, whose last token could be told until now
        if self._batches and list(self._batches[0].sites) != sites:
            raise ValueError(
                "this probe holds results of other layers, and their labels would not fit: take results() and then "
                "reset(), or make a second probe."
            )
        if self.heads is not None and host.n_heads is not None and max(self.heads) >= host.n_heads:
            raise ValueError(f"head {max(self.heads)} was asked for and the model has heads 0 to {host.n_heads - 1}.")
        self._sites = sites
        self._prompt_lengths = check_prompt_lengths(prompt_lengths)
        if any(getattr(analyzer, "measure", None) == "unembedding" for analyzer in self.analyzers):
            self._leverage = leverage_of(host)
        self._verified = set()
        self._forget_call()
        self._host = host
        try:
            self._stack.enter_context(host.watch(self, self._sites, self._parts, logits=self.logits))
        except BaseException:
            self._host = None
            raise

    def _select_layers(self, sites: list[Site], host: Host) -> list[Site]:
        self._attention_layers = sorted({site.layer for site in sites})
        known = self._attention_layers[-1] + 1
        self._n_layers = max(known, host.n_layers or 0) if self.pattern == DEFAULT_PATTERN else known
        chosen = self._probed(sites)
        for analyzer in self.analyzers:
            if not any(self._watches(analyzer, site) for site in chosen):
                raise ValueError(
                    f"{type(analyzer).__name__} is for layers={analyzer.layers!r} and the probe watches none of them: "
                    f"it watches layers {ranges(sorted({site.layer for site in chosen}))}."
                )
        return [site for site in chosen if any(self._watches(analyzer, site) for analyzer in self.analyzers)]

    def _watches(self, analyzer: Analyzer, site: Site) -> bool:
        """Whether an analyzer is for this layer (see `Analyzer.at`)."""
        layers = analyzer.layers
        if isinstance(layers, str):
            return layers == "all" or site.layer in named_layers(layers, self._n_layers)
        return layers is None or site.layer in layers

    def _probed(self, sites: list[Site]) -> list[Site]:
        """The sites in the layers of the probe."""
        if self.layers == "all":
            return sites
        if isinstance(self.layers, str):
            wanted = set(named_layers(self.layers, self._n_layers))
        else:
            wanted = {int(layer) for layer in self.layers}
            there = {site.layer for site in sites}
            if wanted - there:
                raise ValueError(
                    f"layers {sorted(wanted - there)} have no attention pattern here; layers with one: "
                    f"{ranges(sorted(there))}."
                )
        chosen = [site for site in sites if site.layer in wanted]
        if not chosen:
            raise ValueError(
                f"layers={self.layers!r} means {ranges(sorted(wanted))}, and none of them has an attention "
                f"pattern; layers with one: {ranges(sorted({site.layer for site in sites}))}."
            )
        return chosen

    # -- listening ------------------------------------------------------------------------------------------

    def on_call(self, call: Call) -> None:
        """A forward begins (called by the host)."""
        if self._call is not None:
            self._abandon()
        self._forget_call()
        self._entered_late = False
        self._call = call

    def on_part(self, site: Site, part: str, value: Tensor) -> None:
        """Something passes at a site (called by the host)."""
        self._expect(site)
        parts = self._arrived.setdefault(site, {})
        parts[part] = value
        if len(parts) == len(self._parts):
            self._complete(site, parts)
            self._arrived[site] = {}
            self._done.add(site)

    def on_attention(self, site: Site, attention: Attention) -> None:
        """An attention was computed at a site without a pattern (called by the host)."""
        self._expect(site)
        batch, _, n_query, _ = attention.q.shape
        plan = self._plan(site.side, batch, n_query, attention.k.shape[2], attention.q.device)
        if plan.new:
            self._stream(site).take_attention(attention, plan)
        self._done.add(site)

    def _expect(self, site: Site) -> None:
        """A site reports: once in a forward, and in one that has begun."""
        if self._call is None or (site in self._done and self._entered_late):
            self.on_call(Call())  # a forward that enters half way up the model
            self._entered_late = True
        if site in self._done:
            self._abandon(quiet=True)
            raise ValueError(
                f"{site.name} computed attention twice in one forward (differential attention, or layers run again), "
                "so its rows are not those of one pattern: leave the layer out."
            )

    def on_logits(self, logits: Tensor) -> None:
        """The forward gave logits (called by the host)."""
        plan = self._plans.get("decoder")
        if plan is not None and plan.new:
            self._vocabulary = logits.shape[-1]
            if plan.regenerate:  # the prompt has grown: the steps so far were none
                self._tokens = TokenTrace()
            with torch.inference_mode():
                self._tokens.update(logits.detach(), plan, self._sides["decoder"])

    def on_call_end(self, cache: Any = None) -> None:
        """The forward went through (called by the host)."""
        silent = [site for site in self._sites if site not in self._done]
        if silent:
            self._abandon(quiet=True)
            why = self._host.why_silent(silent[0]) if self._host is not None else "the probe was detached meanwhile"
            raise ValueError(
                f"{len(silent)} of {len(self._sites)} watched sites did not report in this forward, the first being "
                f"{silent[0].name} (missing: {self._missing(silent[0])}): {why}."
            )
        if "decoder" in self._plans:
            self._sides["decoder"].remember(cache)
        self._call = None

    def on_generate(self, generation: Generation) -> None:
        """A `generate` begins (called by the host)."""
        self._generation = generation
        self._generation_started = False

    def on_generate_end(self, output: Any) -> None:
        """A `generate` is over (called by the host)."""
        self._generation = None
        if self._call is not None:  # it raised, and the exception is on its way to the caller
            self._call = None
            if self._generation_started:
                self._forget_current()
            return
        sequences = getattr(output, "sequences", output[0] if isinstance(output, tuple) and output else output)
        decoder = self._sides.get("decoder")
        if not self.logits or decoder is None or not isinstance(sequences, Tensor) or sequences.ndim != 2:
            return
        if sequences.shape[1] == decoder.seen + 1 and not sequences.is_floating_point():
            self._tokens.resolve(sequences[:, -1])

    def last_tokens(self, tokens: Tensor) -> None:
        """Say which token each sequence [batch] chose last, where `generate` returned text or was not used."""
        self._tokens.resolve(tokens)

    def _complete(self, site: Site, parts: dict[str, Tensor]) -> None:
        pattern = parts["pattern"]
        if pattern.ndim != 4:
            raise ValueError(
                f"{site.name} gives a pattern of shape {tuple(pattern.shape)}, not [batch, head, query, key]."
            )
        batch, _, n_query, n_key = pattern.shape
        # the keys of cross-attention say nothing about the decoder's past
        plan = self._plan(site.side, batch, n_query, None if site.kind == "cross" else n_key, pattern.device)
        if site.kind == "cross" and "encoder" not in self._plans:
            self._plan("encoder", batch, n_key, n_key, pattern.device)
        if plan.new:
            self._stream(site).take(parts, plan)

    def _plan(self, side: str, batch: int, n_query: int, n_key: int | None, device: torch.device) -> Plan:
        if side in self._plans:
            return self._plans[side]
        assert self._call is not None
        stream = self._call.decoder if side == "decoder" else self._call.encoder
        generation = self._generation if self._generation_started else None
        if n_key is None:
            n_key = n_query + (stream.past or 0)
        sequences = self._sides.get(side)
        if sequences is not None and sequences.batch != batch:
            sequences = None
        if sequences is None:
            check_past(stream.past or 0, 0)
        if sequences is None or not sequences.continues(stream, n_query, n_key, generation):
            if not self._plans:
                self._finish()
            host = self._host
            sequences = Sequences(
                batch,
                device,
                self._prompt_lengths if side == "decoder" else None,
                None if host is None else host.pad_token,
            )
            self._sides[side] = sequences
        if self._generation is not None and not self._generation_started:
            sequences.expect(self._generation)
        self._generation_started = self._generation is not None
        plan = sequences.plan(stream, n_query, n_key, generation)
        self._plans[side] = plan
        return plan

    def _stream(self, site: Site) -> SiteStream:
        if site not in self._streams:
            self._streams[site] = self._new_stream(site)
        return self._streams[site]

    def _new_stream(self, site: Site) -> SiteStream:
        queries = self._sides[site.side]
        first_time = site not in self._verified
        self._verified.add(site)
        return SiteStream(
            site,
            [one for one in self.analyzers if self._watches(one, site)],
            needs=self._parts,
            heads=self.heads,
            policy=self.rows,
            queries=queries,
            keys=self._sides["encoder"] if site.kind == "cross" else queries,
            leverage=self._leverage,
            verify=first_time,
        )

    def _missing(self, site: Site) -> str:
        arrived = self._arrived.get(site, {})
        return ", ".join(part for part in self._parts if part not in arrived)

    # -- sequences ------------------------------------------------------------------------------------------

    def results(self) -> xr.Dataset:
        """Everything collected so far, as an `xarray.Dataset`.

        Dimensions among (sequence, layer, head, step, position). Final values have no step; the values of a trace
        are named `..._trace` and have one, step t (from 1) being the prefix that chose generated token t. Coordinates
        of a sequence: `length` (tokens read), `prompt_length`, `call`. Units and sources are in the attributes.
        Save with `ds.to_netcdf(path)`, load with `xarray.load_dataset(path)`.

        Raises:
            ValueError: nothing has been collected, or a row was not a distribution.
        """
        batches = list(self._batches)
        if self._streams and not self._half_read:
            batches.append(self._current())
        if not batches:
            raise ValueError("nothing has been collected: run the model while the probe is attached.")
        attributes: dict[str, Any] = {"n_layers": self._n_layers, "attention_layers": self._attention_layers}
        if self._vocabulary is not None:
            attributes["vocabulary"] = self._vocabulary
        return dataset_of(batches, self.analyzers, self.heads, attributes)

    def _current(self) -> Batch:
        with torch.inference_mode():
            values = {site: stream.values() for site, stream in self._streams.items()}
            decoder = self._sides.get("decoder") or self._sides["encoder"]
            return Batch.of(
                call=len(self._batches),
                sites=[site for site in self._sites if site in values],
                values=values,
                sequences=decoder,
                tokens=self._tokens.rows() if self.logits else None,
            )

    def _finish(self) -> None:
        """Put the current sequences away: values only, on the host, nothing on the device."""
        if self._streams:
            self._batches.append(self._current())
        self._forget_current()

    def _abandon(self, *, quiet: bool = False) -> None:
        """The last forward raised part way: its sequences have rows in some layers only."""
        lost = self._half_read
        self._call = None
        if lost:
            self._forget_current()
        if lost and not quiet:
            warnings.warn(
                "a forward of the watched model raised before it was through; the sequences it belonged to are "
                "dropped from the results.",
                stacklevel=2,
            )

    @property
    def _half_read(self) -> bool:
        """A forward was begun and not ended, and some layers have taken its rows."""
        return self._call is not None and bool(self._plans)

    def _forget_current(self) -> None:
        self._sides = {}
        self._streams = {}
        self._tokens = TokenTrace()

    def _forget_call(self) -> None:
        self._call = None
        self._plans = {}
        self._arrived = {}
        self._done = set()

    def __repr__(self) -> str:
        names = ", ".join(type(analyzer).__name__ for analyzer in self.analyzers)
        heads = "all" if self.heads is None else list(self.heads)
        return f"Probe([{names}], layers={self.layers!r}, heads={heads!r})"
