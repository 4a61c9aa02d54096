"""Made-up features, and a tiny model with a tokenizer of words."""

from __future__ import annotations

import functools

import numpy as np
import torch
from tiny import VOCAB, tiny_bridge, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attnprobe.detection import Features, FeatureSettings, Fingerprint

MODEL = Fingerprint(3, 4, VOCAB, "weights")


def features(values: np.ndarray, lengths: np.ndarray | None = None) -> Features:
    """Features of a made-up model: 3 a head, as many heads as there is room for."""
    texts, number = values.shape
    assert number % 3 == 0
    heads = tuple((i // 4, i % 4) for i in range(number // 3))
    length = np.full(texts, 10) if lengths is None else lengths
    settings = FeatureSettings("transport", heads=heads)
    return Features(values.astype(np.float32), settings, heads, MODEL, length, length, np.zeros(texts, dtype=int))


def told(texts: int, number: int = 6, seed: int = 0, strength: float = 1.0) -> tuple[Features, np.ndarray, np.ndarray]:
    """Features of which the first tells the label, labels, and questions of two answers each."""
    generator = np.random.default_rng(seed)
    labels = np.arange(texts) % 2
    values = generator.normal(size=(texts, number))
    values[:, 0] += strength * (2 * labels - 1)
    return features(values), labels, np.arange(texts) // 2


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@functools.cache
def model(host: str = "transformers"):
    """One and the same model under each host."""
    made = tiny_bridge("llama") if host == "bridge" else tiny_model("llama", attention="sdpa")
    made.tokenizer = word_tokenizer()
    return made


def token_ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
