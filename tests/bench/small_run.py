"""A benchmark run of some tens of tiny examples on a tiny model in a folder, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch

WORDS = ("the", "cat", "sat", "on", "mat", "dog", "ran", "to", "a", "red", "blue", "hat")
METHODS = ("SAUQ", "RAUQ", "Perplexity")
CONTEXT = 64


def save_model(folder: Path) -> Path:
    """A tiny Llama with a tokenizer of whole words; it answers otherwise to every prompt."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(("<s>", "</s>", "<unk>", *WORDS))}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    ).save_pretrained(folder)
    return folder


def save_rows(path: Path, n: int, seed: int = 0) -> Path:
    """Questions of one to twelve words, every length many times."""
    generator = torch.Generator().manual_seed(seed)
    with open(path, "w", encoding="utf-8") as file:
        for i in range(n):
            length = int(torch.randint(1, 13, (), generator=generator))
            words = [WORDS[int(k)] for k in torch.randint(0, len(WORDS), (length,), generator=generator)]
            row = {"id": f"q{i}", "question": " ".join(words), "references": [words[0], "cat"]}
            file.write(json.dumps(row) + "\n")
    return path


def task(data: Path, label: str, **changes: Any) -> dict[str, Any]:
    """A task of one's own as a configuration has it."""
    return {
        "task": label,
        "data": str(data),
        "template": "{question}{answer}",
        "max_new_tokens": 4,
        "quality": "token_f1",
        **changes,
    }


def write_config(folder: Path, model: Path, rows: int = 21, **changes: Any) -> Path:
    """A configuration file with two tasks, its data beside it, results in `folder / "out"`."""
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    first = save_rows(folder / "first.jsonl", rows)
    second = save_rows(folder / "second.jsonl", rows // 2, seed=1)
    said = {
        "model": str(model),
        "device": "cpu",
        "batch_size": 4,
        "methods": list(METHODS),
        "tasks": [task(first, "first"), task(second, "second")],
        "output": str(folder / "out"),
        **changes,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(said, allow_unicode=True), encoding="utf-8")
    return path


# id -> what `picky` gives, or raises
FAILING: dict[str, Any] = {"q1": KeyError("no such key"), "q3": float("nan")}


def picky(example: Any, text: str) -> float:
    """A quality that has faults."""
    found = FAILING.get(example.id, 1.0)
    if isinstance(found, Exception):
        raise found
    return found


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows in an order of their own and without what the clock said."""
    ordered = frame.drop(columns="seconds").sort_values(["task", "id"]).reset_index(drop=True)
    assert not ordered.duplicated(["task", "id"]).any()
    return ordered
