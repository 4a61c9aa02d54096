"""Book-keeping of one batch of sequences: which slots are real tokens, and at which positions.

A *slot* is a column of the host's batch: position in the padded prompt, then one a decode step. A *position* counts
real tokens of one sequence. Everything above this file speaks of positions only.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attnprobe.hosts.base import Generation, Stream


@dataclass(frozen=True)
class Plan:
    """What the rows of one forward are to the sequences.

    Attributes:
        fresh: the forward starts new sequences.
        skip: leading rows already seen (a model that decodes without a cache sends them again).
        start: slot of the first new row; new: number of new rows (0: nothing new, ignore the forward).
        trace_from: first new row whose prefix is a step of the trace, None if none is.
        regenerate: the prompt has grown after generated rows were seen: what was kept of them is void.
        masks: the host's masks of this forward that have been looked at (identity, window): layers share them.
    """

    fresh: bool
    skip: int
    start: int
    new: int
    trace_from: int | None
    regenerate: bool = False
    masks: set[tuple[int, int | None]] = field(default_factory=set)


class Sequences:
    """One batch of sequences, growing forward by forward.

    Attributes:
        batch: number of sequences.
        seen: slots so far.
        width: no sequence has more real tokens than this.
        padded: some slots may be padding, so rows and keys must be sorted out.
        prompt_length: [batch] real tokens before the generation; shortest_prompt: the smallest.
        longest_generation: no sequence has more tokens after its prompt.
        generated: rows after the prompt have been seen.
    """

    def __init__(
        self, batch: int, device: torch.device, prompt_lengths: tuple[int, ...] | None, pad_token: int | None
    ) -> None:
        self.batch = batch
        self.device = device
        self.seen = 0
        self.width = 0
        self.padded = False
        self.cached = False
        self._forwards = 0
        self._prompt_slots = 0
        self._declared = False
        self._cache: weakref.ref[Any] | None = None
        self.generated = False
        self.tokens: Int[Tensor, "batch slot"] | None = None
        self._real: Bool[Tensor, "batch slot"] = torch.zeros(batch, 0, dtype=torch.bool, device=device)
        self._alive: Bool[Tensor, "batch"] | None = None
        self._pad_token = pad_token
        self._fixed_prompt = None
        if prompt_lengths is not None:
            if len(prompt_lengths) not in (1, batch):
                raise ValueError(
                    f"prompt_lengths has {len(prompt_lengths)} entries and the batch {batch} sequences: give one "
                    "for each, or one for all."
                )
            self._fixed_prompt = torch.tensor(prompt_lengths, device=device).expand(batch)
        self.prompt_length: Int[Tensor, "batch"] = torch.zeros(batch, dtype=torch.int64, device=device)
        self.shortest_prompt = 0
        self.longest_generation = 0

    # -- growing -------------------------------------------------------------------------------------------

    def plan(self, stream: Stream, n_query: int, n_key: int, generation: Generation | None) -> Plan:
        """Place a forward of n_query rows on n_key keys, and take its slots in."""
        skip = self._skip(stream, n_query, n_key, generation)
        self._forwards = self._forwards + 1 if generation is not None else 1
        new = n_query - skip
        start = self.seen
        if new <= 0:
            return Plan(False, skip, start, 0, None)
        if start and not skip:
            self.cached = True
        if n_query == n_key == 1 < start + new:
            raise ValueError(_EMPTY_CACHE)
        self._refuse_ended(new, generation)
        regenerate = new > 1 and self.generated and self._fixed_prompt is None
        self._append(stream, new, generation)
        trace_from = self._place_prompt(start, new)
        return Plan(start == 0, skip, start, new, trace_from, regenerate)

    def continues(self, stream: Stream, n_query: int, n_key: int, generation: Generation | None) -> bool:
        """Whether a forward goes on with these sequences, rather than starting new ones.

        Raises:
            ValueError: the cache it works on holds tokens that were not seen here.
        """
        past = stream.past
        if past is None:
            past = max(0, n_key - n_query)
        if past == 0:
            if generation is not None and self.seen:
                return True
            starved = n_query == n_key == 1 and stream.mask is not None and stream.mask.shape[-1] > 1
            if starved:
                raise ValueError(_EMPTY_CACHE)
            return False
        check_past(past, self.seen)
        if stream.cache is not None and self._cache is not None and self._cache() is not stream.cache:
            raise ValueError(
                "the model's cache is not the one that the last sequences were read into, so its tokens have not been "
                "seen here: a probe follows one conversation at a time, and a new forward without a cache begins one."
            )
        return True

    def remember(self, cache: Any) -> None:
        """The cache these sequences are in, after a forward."""
        with contextlib.suppress(TypeError):  # a cache made of plain tuples has no identity worth keeping
            self._cache = None if cache is None else weakref.ref(cache)

    def expect(self, generation: Generation) -> None:
        """A `generate` begins: how wide its prompt is, and whether padding was declared."""
        self._prompt_slots = generation.prompt_slots
        self._declared = generation.masked

    def _skip(self, stream: Stream, n_query: int, n_key: int, generation: Generation | None) -> int:
        if not self.seen or generation is None or (stream.past or n_key > n_query):
            return 0
        # in a generate, a forward without past: either every row again (no cache), or a look at the finished
        # text after cached decoding, which brings nothing new
        if n_query == 1 and self.seen:
            raise ValueError(_EMPTY_CACHE)
        over = self.cached or (generation.looks_back and self._ended(stream, generation))
        return n_query if over else min(self.seen, n_query)

    def _ended(self, stream: Stream, generation: Generation) -> bool:
        """Whether a generate without a cache has given its last token before this forward."""
        if generation.max_forwards is not None and self._forwards >= generation.max_forwards:
            return True
        return stream.tokens is not None and bool(
            (stream.tokens[:, -1].cpu() == torch.tensor(generation.stop_tokens)).any()
        )

    def _refuse_ended(self, new: int, generation: Generation | None) -> None:
        """After a `generate` in which rows of the batch stopped, what follows them in the cache is not theirs."""
        if self._alive is not None and (new > 1 or generation is None) and not bool(self._alive.all()):
            raise ValueError(
                f"sequence {int(self._alive.to(torch.int64).argmin())} of the batch ended in the last generate and ran "
                "on as padding, which the cache now holds: give the conversation anew in one forward without the "
                "cache, or go on with one sequence at a time."
            )

    def _append(self, stream: Stream, new: int, generation: Generation | None) -> None:
        real = self._real_slots(stream, new)
        tokens = None if stream.tokens is None else stream.tokens[:, -new:].to(self.device)
        # (the first forward of a generate comes without `generation`: a prompt may hold stop tokens)
        decodes = new == 1 and generation is not None and self.batch > 1 and self.seen >= self._prompt_slots
        if decodes and generation is not None and generation.own_criteria:
            raise ValueError(
                "in a batch, where stop strings or criteria end a sequence cannot be seen from outside, and padding "
                "would be taken for text: generate one at a time, or use attnprobe.score with stop=."
            )
        if decodes and tokens is not None and generation is not None and generation.stop_tokens:
            stop = torch.tensor(generation.stop_tokens, device=self.device)
            alive = ~torch.isin(tokens[:, -1], stop)
            self._alive = alive if self._alive is None else self._alive & alive
            real = real & self._alive[:, None]
            self.padded = True
        self._real = torch.cat([self._real, real], 1)
        if tokens is None or (self.seen and self.tokens is None):
            self.tokens = None
        else:
            self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        self.seen += new
        if new > 1 and self.padded:
            self.width = int(self._real.sum(1).max())
            if self.width == 0 and self.seen >= self._prompt_slots:  # not just the first chunk of a prompt
                raise ValueError("the attention mask leaves no token at all: check that 1 marks real tokens.")
        else:
            self.width += new

    def _real_slots(self, stream: Stream, new: int) -> Bool[Tensor, "batch slot"]:
        mask = stream.mask
        if mask is None:
            if self.padded and self._alive is None:
                raise ValueError(
                    "the prompt came with an attention mask and this forward without: the model would look at "
                    "padding. Pass attention_mask= over all tokens, past ones included."
                )
            if new > 1 and not self._declared:
                self._suspect_padding(stream.tokens)
            return torch.ones(self.batch, new, dtype=torch.bool, device=self.device)
        if mask.ndim != 2:
            raise ValueError(
                f"an attention mask of shape {tuple(mask.shape)} does not say which tokens are padding: pass a "
                "[batch, tokens] mask of 0 and 1 (a static cache builds such masks by itself: use a dynamic one)."
            )
        real = mask[:, self.seen : self.seen + new].to(self.device) > 0
        if real.shape != (self.batch, new):
            raise ValueError(
                f"the attention mask has shape {tuple(mask.shape)}, and {self.batch} sequences of {self.seen} past and "
                f"{new} new tokens need one that covers them all."
            )
        # one look at a small tensor: free on the CPU, and on an accelerator taken only where a prompt is read
        if new > 1 or self.device.type == "cpu":
            self.padded = self.padded or not bool(real.all())
        else:
            self.padded = True
        return real

    def _suspect_padding(self, tokens: Tensor | None) -> None:
        """A batch that looks padded and comes without a mask has wrong numbers in it: say so."""
        if tokens is None or self._pad_token is None or tokens.shape[0] < 2:
            return
        pad = (tokens == self._pad_token).to(torch.int64)
        leading = pad.cumprod(1).sum(1)
        trailing = pad.flip(1).cumprod(1).sum(1)
        if bool((leading != leading[0]).any()) or (int(trailing.max()) > 1 and bool((trailing != trailing[0]).any())):
            raise ValueError(
                f"the batch looks padded with token {self._pad_token} and no attention_mask was given, so padding "
                "would be taken for text: pass attention_mask= to the model."
            )

    def _place_prompt(self, start: int, new: int) -> int | None:
        """Set the prompt lengths and find the first new row that is a step."""
        self.longest_generation += new
        if self._fixed_prompt is not None:
            self.prompt_length = self._fixed_prompt
            self.shortest_prompt = int(self._fixed_prompt.min()) if start == 0 else self.shortest_prompt
            if new > 1:
                self.longest_generation = max(0, int((self._real.sum(1) - self._fixed_prompt).max()))
        elif new > 1 or start == 0 or self.seen <= self._prompt_slots:
            self.prompt_length = self._real.sum(1)
            self.shortest_prompt = int(self.prompt_length.min()) if self.padded else self.width
            self.longest_generation = 0
            self.generated = False
        else:
            self.generated = True
            return 0
        if new == 1:  # without asking the device; a row before the first step is sorted out with the results
            return 0
        steps = (self.positions(start, new) >= self.prompt_length[:, None] - 1).any(0)
        first = steps.to(torch.int64).argmax()
        return int(first) if bool(steps.any()) else None

    # -- reading -------------------------------------------------------------------------------------------

    # A model may be spread over devices: each layer asks for its own.

    def positions(self, start: int, new: int, device: torch.device | None = None) -> Int[Tensor, "batch slot"]:
        """Position of each of these slots, -1 for padding."""
        device = self.device if device is None else device
        if not self.padded:
            return torch.arange(start, start + new, device=device).expand(self.batch, -1)
        real = self._real[:, : start + new].to(device)
        return torch.where(real[:, start:], real.cumsum(1)[:, start:] - 1, -1)

    def key_order(
        self, slots: int, device: torch.device | None = None
    ) -> tuple[Int[Tensor, "batch key"], Bool[Tensor, "batch key"]]:
        """For the first `slots` slots: the slot of each position, and which positions are real."""
        real = self._real[:, :slots].to(self.device if device is None else device)
        order = torch.argsort(~real, dim=1, stable=True)[:, : self.width]
        return order, real.gather(1, order)

    def length(self) -> Int[Tensor, "batch"]:
        """Real tokens of each sequence.

        Raises:
            ValueError: a sequence has none. (The first chunk of a padded prompt may have none; the whole may not.)
        """
        length = self._real.sum(1)
        if not bool(length.all()):
            raise ValueError(
                f"the attention mask leaves sequence {int(length.argmin())} of the batch without a token: drop it, and "
                "check that 1 marks real tokens."
            )
        return length

    def tokens_by_position(self, slots: int, device: torch.device | None = None) -> Int[Tensor, "batch key"] | None:
        """Token ids by position, -1 where there is none."""
        if self.tokens is None:
            return None
        tokens = self.tokens[:, :slots].to(self.device if device is None else device)
        if not self.padded:
            return tokens
        order, real = self.key_order(slots, device)
        return torch.where(real, tokens.gather(1, order), -1)


def check_past(past: int, seen: int) -> None:
    """Refuse a forward on a cache that holds other tokens than were seen.

    Raises:
        ValueError: it does.
    """
    if past != seen:
        raise ValueError(
            f"the model's cache holds {past} tokens and the probe has seen {seen} of them: attach the probe before the "
            "prompt is read, keep the batch as it is, and do not crop the cache under it."
        )


_EMPTY_CACHE = (
    "a decode step sees one key only: the key/value cache stayed empty, so the model forgets everything at each token. "
    "transformers 5.24 does this under transformer-lens 3.9 to 4.3 (it renamed the cache argument); install "
    "'transformers>=5.9,<5.24'."
)
