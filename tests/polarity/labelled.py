"""Labelled answers, a tokenizer of words and a tiny model to read them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
from tiny import VOCAB, tiny_model

from attnprobe.polarity import Features, LabelledAnswer
from attnprobe.polarity.features import QUANTITIES

WORDS = (
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "looked",
    "at",
    "every",
    "bird",
    "by",
    "the",
    "old",
    "house",
    "near",
    "us",
)


class WordTokenizer:
    """A token a word; `<s>` before a text unless special tokens are off."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [3 + zlib.crc32(word.encode()) % (VOCAB - 3) for word in text.split()]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


def reader(name: str = "llama", attention: str = "sdpa"):
    model = tiny_model(name, attention=attention)
    model.tokenizer = WordTokenizer()
    return model


def words(n: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + i * 7) % len(WORDS)] for i in range(n))


def pairs(n_questions: int, prompt: int = 12) -> list[LabelledAnswer]:
    """Two answers a question, of lengths that differ."""
    return [
        LabelledAnswer(
            f"q{q}:{label}", f"q{q}", words(prompt + q % 4, q), words(2 + (q + label) % 5, 3 * q + label), label
        )
        for q in range(n_questions)
        for label in (0, 1)
    ]


def write_pairs(path: Path, n_questions: int, prompt: int = 12) -> Path:
    """The same as a JSONL file that the plain recipe reads."""
    rows = [
        {"id": a.id, "group": a.group, "prompt": a.prompt, "answer": a.answer, "label": a.label}
        for a in pairs(n_questions, prompt)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def features(
    values: dict[str, np.ndarray], label: np.ndarray, group: np.ndarray, tokens: np.ndarray, name: str = "made"
) -> Features:
    """Features as if a model had been read: quantities that are not given are noise."""
    n, layers, heads = next(iter(values.values())).shape
    generator = np.random.default_rng(7)
    answers = pd.DataFrame(
        {
            "id": [f"a{i}" for i in range(n)],
            "group": [f"g{g}" for g in group],
            "label": label.astype(int),
            "prompt_tokens": 10,
            "tokens": tokens,
            "prompt_tokens_cut": 0,
        }
    )
    filled = {quantity: values.get(quantity, generator.random((n, layers, heads))) for quantity in QUANTITIES}
    return Features(name, answers, filled, tuple(range(layers)), {})
