"""Several sampled answers to one prompt, decoded together on copies of one cache.

No probe is attached: what is wanted of a sample is its text and the probability of all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.hosts import Host
from attnprobe.hosts.caches import repeated
from attnprobe.uncertainty.decode import Decoding, note, shaper


@dataclass(frozen=True)
class SamplingSettings:
    """How answers are sampled.

    Attributes:
        n_samples: how many for each prompt.
        temperature: logits are divided by it.
        top_k: only the k most probable tokens can be drawn; None for all.
        top_p: only the most probable tokens that make up this probability can be drawn; None for all.

    Raises:
        ValueError: a number that makes no sense, in one sentence.
    """

    n_samples: int = 10
    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float | None = None

    def __post_init__(self) -> None:
        _check_whole("n_samples", self.n_samples)
        if self.top_k is not None:
            _check_whole("top_k", self.top_k)
        if not _is_number(self.temperature) or not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature!r}: use a number above 0.")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r}: use a number above 0 and at most 1, or None.")


@dataclass(frozen=True)
class Sample:
    """One sampled answer.

    Attributes:
        text: without special tokens, cut at a stop string.
        token_ids: what the model gave, the token or stop string that ended it included.
        log_probability: of all these tokens, nats: the sum of the model's own log-probabilities, before temperature,
            top_k and top_p.
        finish: why it ended: "eos", "stop" or "length".
    """

    text: str
    token_ids: list[int] = field(repr=False)
    log_probability: float
    finish: str


@dataclass(frozen=True)
class Sampling:
    """Where and how samples are decoded.

    Attributes:
        host: the model.
        how: length limit and what ends an answer; its `choose` is not used.
        device: where tokens go.
        batch_size: samples a forward, at most.
        seed: >= 0; with the numbers of prompt and sample it decides what is drawn, whatever is drawn beside it.
        text: the text of token ids, given why they ended.
    """

    host: Host
    how: Decoding
    device: torch.device
    batch_size: int
    seed: int
    text: Callable[[list[int], str], str]

    def draw(self, prompt: Sequence[int], number: int, settings: SamplingSettings) -> list[Sample]:
        """Sampled answers to prompt number `number`.

        The prompt is read once and its cache repeated; where a host's cache cannot be, the prompt is read for every
        sample.
        """
        n, steps = settings.n_samples, self.how.max_new_tokens
        chance = torch.from_numpy(
            # a longer answer begins as a shorter one does, and more samples as fewer
            np.stack([np.random.default_rng([self.seed, number, sample]).random(steps) for sample in range(n)])
        )
        with torch.no_grad():
            tokens = torch.tensor([list(prompt)], device=self.device)
            prefix = _Prefix(tokens, *self.host.decode(tokens, torch.ones_like(tokens), None, 1))
            batches = chance.tensor_split(-(-n // self.batch_size))
            return [sample for batch in batches for sample in self._continue(prefix, settings, batch)]

    def _continue(
        self, prefix: _Prefix, settings: SamplingSettings, chance: Float[Tensor, "sample step"]
    ) -> list[Sample]:
        """Decode one batch of samples from their chances in [0, 1)."""
        shape = shaper(settings.temperature, settings.top_k, settings.top_p)
        n, exact = len(chance), _exact(self.device)
        chance = chance.to(exact)
        answers: list[list[int]] = [[] for _ in range(n)]
        finish: list[str | None] = [None] * n
        total = torch.zeros(n, dtype=torch.float64, device=exact)
        mask = torch.ones(n, prefix.tokens.shape[1], dtype=torch.int64, device=self.device)
        logits, cache = prefix.for_several(self.host, n)
        for step in range(self.how.max_new_tokens):
            running = torch.tensor([reason is None for reason in finish], device=exact)
            last = logits[:, -1].to(exact).double()
            chosen = _pick(shape(last).softmax(-1), chance[:, step])
            own = last.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
            total += torch.where(running, own, 0.0)
            note(chosen.tolist(), answers, finish, self.how)
            if all(reason is not None for reason in finish):
                break
            # what a sample that has ended is fed is padding
            real = torch.tensor([[reason is None] for reason in finish], device=self.device)
            mask = torch.cat([mask, real.to(mask.dtype)], 1)
            logits, cache = self.host.decode(chosen[:, None].to(self.device), mask, cache, 1)
        return [
            Sample(self.text(answer, reason or "length"), answer, log_probability, reason or "length")
            for answer, log_probability, reason in zip(answers, total.tolist(), finish, strict=True)
        ]


@dataclass(frozen=True)
class _Prefix:
    """A prompt that was read: its tokens [1, slot], the logits after it, and the cache."""

    tokens: Int[Tensor, "1 slot"]
    logits: Float[Tensor, "1 query vocab"]
    cache: Any

    def for_several(self, host: Host, n: int) -> tuple[Float[Tensor, "n query vocab"], Any]:
        """Logits and cache as if n sequences had read the prompt."""
        cache = repeated(self.cache, n)
        if cache is not None:
            return self.logits.expand(n, -1, -1), cache
        tokens = self.tokens.expand(n, -1).contiguous()
        return host.decode(tokens, torch.ones_like(tokens), None, 1)


def seed_of(seed: int | None) -> int:
    """A seed >= 0 for `Sampling`; without one, torch's own generator gives it."""
    return int(torch.randint(2**62, ())) if seed is None else int(seed) % 2**64


def _exact(device: torch.device) -> torch.device:
    """Where there is float64."""
    return torch.device("cpu") if device.type == "mps" else device


def _pick(probability: Float[Tensor, "sample vocab"], chance: Float[Tensor, "sample"]) -> Int[Tensor, "sample"]:
    """The token in whose share of [0, 1) each chance falls: a draw that does not depend on who else is drawn for."""
    reached = probability.cumsum(-1)
    everything = reached[:, -1:]
    below = torch.nextafter(everything, torch.zeros_like(everything))  # rounding must not lead beyond the last share
    target = (chance[:, None] * everything).minimum(below)
    return torch.searchsorted(reached, target, right=True).squeeze(1)


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r}: use a whole number of at least 1.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
