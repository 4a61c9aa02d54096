"""What is measured: a model on a host library, a prompt, and how many tokens are generated from it.

Models with random weights need no download and have the shapes of well-known ones; what watching costs depends on
shapes, not on what the weights know.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import attnprobe as ap

HOSTS = ("transformer_lens", "transformers")
EMBEDDED = "SmolLM2-135M-Instruct"

# hidden size, intermediate size, layers, heads, key/value heads, vocabulary, tied embeddings
RANDOM_LLAMAS = {
    "random-llama-tiny": (64, 128, 4, 4, 2, 1000, True),
    "random-llama-1b": (2048, 8192, 16, 32, 8, 128256, True),
    "random-llama-8b": (4096, 14336, 32, 32, 8, 128256, False),
}

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters. "
)


@dataclass(frozen=True)
class Workload:
    """One point of the benchmark.

    Attributes:
        host: "transformer_lens" or "transformers".
        model: the embedded model, a folder or hub name, or one of `RANDOM_LLAMAS`.
        device: "cpu", "cuda" or another device of torch.
        dtype: name of a torch dtype, None for that of the checkpoint.
        prompt, new_tokens, batch: tokens read, tokens generated greedily, sequences at once.
        heads: how many heads of a layer a probe watches, None for all. Scores watch all heads whatever this says.
    """

    host: str = "transformer_lens"
    model: str = EMBEDDED
    device: str = "cpu"
    dtype: str | None = None
    prompt: int = 512
    new_tokens: int = 32
    batch: int = 1
    heads: int | None = None

    def __post_init__(self) -> None:
        if self.host not in HOSTS:
            raise ValueError(f"unknown host {self.host!r}; the hosts are {' and '.join(HOSTS)}.")
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"unknown dtype {self.dtype!r}; for example float32, bfloat16 or float16.")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"the device {self.device!r} is not available to this PyTorch.")
        for name in ("prompt", "new_tokens", "batch", "heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: use a whole number of at least 1.")

    @property
    def loaded_as(self) -> Workload:
        """The part that decides which model is loaded: workloads equal in it share one."""
        return dataclasses.replace(self, prompt=1, new_tokens=1, batch=1, heads=None)

    @property
    def label(self) -> str:
        """For a headline."""
        parts = [self.model, self.host, f"{self.prompt} + {self.new_tokens} tokens", self.device]
        if self.dtype:
            parts.append(self.dtype)
        if self.batch > 1:
            parts.append(f"batch {self.batch}")
        if self.heads:
            parts.append(f"{self.heads} heads a layer")
        return ", ".join(parts)


def load(workload: Workload) -> Any:
    """The model of a workload, on its device, such that no end-of-text token ends a generation early."""
    placed: Any = {"host": workload.host, "device": workload.device, "dtype": workload.dtype}
    if workload.model in RANDOM_LLAMAS:
        plain = random_llama(workload.model, workload.device, workload.dtype or "float32")
        return as_host(plain, workload.host)
    name = None if workload.model == EMBEDDED else workload.model
    return never_ending(ap.load_model(name, **placed))


def as_host(plain: Any, host: str) -> Any:
    """A transformers model as a model of the host library. (A bridge replaces the attention of the model it takes.)"""
    return never_ending(ap.load_model(plain, host=host))  # type: ignore[arg-type] # checked by Workload


def random_llama(name: str, device: str, dtype: str) -> Any:
    """A Llama with random weights, made where it is to run."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = RANDOM_LLAMAS[name]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        # queries and keys of unit variance: attention as uneven as that of a trained model, whatever the width
        initializer_range=hidden**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.eval()


def never_ending(model: Any) -> Any:
    """Take the end-of-text token out of every place where a generation looks for one.

    (An argument `eos_token_id=None` would be filled in again from the model's own settings.)
    """
    original = getattr(model, "original_model", model)
    holders = [getattr(original, "generation_config", None), getattr(original, "config", None)]
    holders += [getattr(model, "cfg", None), getattr(model, "generation_config", None)]
    holder: Any
    for holder in holders:
        if hasattr(holder, "eos_token_id"):
            holder.eos_token_id = None
    if getattr(original, "generation_config", None) is not None and original.generation_config.pad_token_id is None:
        original.generation_config.pad_token_id = 0  # never used: all prompts are of one length
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.eos_token = None
    return model


def prompt_ids(model: Any, workload: Workload) -> torch.Tensor:
    """Token ids [batch, prompt]: the opening of a novel again and again, or random ids without a tokenizer.

    Each row of a batch begins a few tokens later than the one before.
    """
    length = workload.prompt + 7 * (workload.batch - 1)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        original = getattr(model, "original_model", model)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, original.config.vocab_size, (length,), generator=generator)
    else:
        ids = torch.tensor(tokenizer(TEXT * (length // 40 + 1))["input_ids"][:length])
    rows = [ids[7 * row : 7 * row + workload.prompt] for row in range(workload.batch)]
    return torch.stack(rows).to(workload.device)


@contextlib.contextmanager
def attention(model: Any, implementation: str) -> Iterator[None]:
    """A transformers model computing its attention in another way for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
