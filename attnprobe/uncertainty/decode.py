"""Decoding a batch token by token under a probe: greedy or sampled, with stop strings, or along a given text.

The loop is our own rather than the host's `generate`, so that every host is driven alike: masks say exactly which
slots are text, a sequence that has stopped is padding from then on, and whatever a checkpoint's generation settings
say plays no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.hosts import Host
from attnprobe.probe import Probe

Chooser = Callable[[Float[Tensor, "batch vocab"]], Int[Tensor, "batch"]]


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: at most so many.
        choose: next tokens [batch] from logits [batch, vocab]: `greedy`, or `sampler(...)`.
        stop_tokens: ids that end an answer (and belong to it).
        stopped: for stop strings: whether the token ids of an answer so far end it.
    """

    max_new_tokens: int
    choose: Chooser
    stop_tokens: tuple[int, ...] = ()
    stopped: Callable[[list[int]], bool] | None = None


@dataclass(frozen=True)
class Decoded:
    """Token ids of one answer and why it ended: "eos", "stop", "length" or "given"."""

    tokens: list[int]
    finish: str


def generate(
    host: Host,
    probe: Probe,
    prompts: Sequence[Sequence[int]],
    how: Decoding,
    device: torch.device,
    last_row: bool,
) -> list[Decoded]:
    """Generate for a batch of prompts under an attached probe.

    Args:
        last_row: let the model see the last generated token too, for scores that read its row.
    """
    tokens, mask = left_padded(prompts, device)
    answers: list[list[int]] = [[] for _ in prompts]
    finish: list[str | None] = [None] * len(prompts)
    cache = None
    chosen = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    for step in range(how.max_new_tokens):
        logits, cache = host.decode(tokens, mask, cache, 1)
        # layers may be on several devices, and the last one need not be where tokens are
        picked = how.choose(logits[:, -1].float().to(device))
        # a sequence that has ended keeps its last token: what is fed for it is padding
        running = torch.tensor([reason is None for reason in finish], device=device)
        chosen = torch.where(running, picked, chosen)
        just_ended = note(chosen.tolist(), answers, finish, how)
        ended = all(reason is not None for reason in finish)
        if (ended or step + 1 == how.max_new_tokens) and not last_row:
            break
        tokens = chosen[:, None]
        real = torch.tensor(
            [reason is None or (last_row and i in just_ended) for i, reason in enumerate(finish)],
            device=device,
        )
        mask = torch.cat([mask, real[:, None].to(mask.dtype)], 1)
        if ended or step + 1 == how.max_new_tokens:
            host.decode(tokens, mask, cache, 1)
            break
    probe.last_tokens(chosen)
    return [Decoded(answer, reason or "length") for answer, reason in zip(answers, finish, strict=True)]


def read(
    host: Host,
    probe: Probe,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    device: torch.device,
    last_row: bool,
) -> list[Decoded]:
    """Let the model read given answers under an attached probe, in one forward."""
    fed = [
        [*prompt, *(completion if last_row else completion[:-1])]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    tokens, mask = left_padded(fed, device)
    host.decode(tokens, mask, None, max(map(len, completions)) + last_row)
    probe.last_tokens(torch.tensor([completion[-1] for completion in completions], device=device))
    return [Decoded(list(completion), "given") for completion in completions]


def left_padded(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "batch slot"], Int[Tensor, "batch slot"]]:
    """Token ids and mask with padding on the left; the padding id is never looked at."""
    width = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, sequence in enumerate(sequences):
        tokens[i, width - len(sequence) :] = torch.tensor(sequence)
        mask[i, width - len(sequence) :] = 1
    return tokens.to(device), mask.to(device)


def note(chosen: list[int], answers: list[list[int]], finish: list[str | None], how: Decoding) -> set[int]:
    """Add each running sequence's token and see whether it ends there; gives those that did."""
    just_ended = set()
    for i, token in enumerate(chosen):
        if finish[i] is not None:
            continue
        answers[i].append(token)
        if token in how.stop_tokens:
            finish[i] = "eos"
        elif how.stopped is not None and how.stopped(answers[i]):
            finish[i] = "stop"
        elif len(answers[i]) == how.max_new_tokens:
            finish[i] = "length"
        if finish[i] is not None:
            just_ended.add(i)
    return just_ended


def greedy(logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, "batch"]:
    """The most probable token; the lowest id of a tie."""
    return logits.argmax(-1)


def sampler(
    device: torch.device, temperature: float, top_k: int | None, top_p: float | None, seed: int | None
) -> Chooser:
    """Draws from the distribution that temperature, top_k and top_p shape; one stream of draws from one seed."""
    shape = shaper(temperature, top_k, top_p)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def draw(logits: Tensor) -> Tensor:
        return torch.multinomial(shape(logits).softmax(-1), 1, generator=generator).squeeze(-1)

    return draw


def shaper(
    temperature: float, top_k: int | None, top_p: float | None
) -> Callable[[Float[Tensor, "batch vocab"]], Float[Tensor, "batch vocab"]]:
    """What temperature, top_k and top_p make of logits, in this order; -inf for tokens that cannot be drawn."""
    from transformers.generation import logits_process as processors

    warpers: list[Callable[[Tensor, Tensor], Tensor]] = []
    if temperature != 1.0:
        warpers.append(processors.TemperatureLogitsWarper(temperature))
    if top_k is not None:
        warpers.append(processors.TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(processors.TopPLogitsWarper(top_p))

    def shape(logits: Tensor) -> Tensor:
        no_tokens = torch.zeros(0, 0, dtype=torch.int64, device=logits.device)
        for warp in warpers:
            logits = warp(no_tokens, logits)
        return logits

    return shape
