"""AlignScore: how far a context supports a claim, by a RoBERTa with a head of three classes.

Contexts are cut into chunks of about 350 words and claims into sentences; the score is the probability of "aligned",
the largest over the chunks, averaged over the sentences.

Source: arXiv 2305.16739, in the mode that its authors call nli_sp.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attnprobe.bench.extra import need

_WORDS_A_CHUNK = 350
_ALIGNED = 0  # of aligned, contradicting, neutral
Split = Callable[[str], list[str]]


class AlignScore:
    """The scorer itself.

    Args:
        encoder: a RoBERTa with its pooling layer.
        head: from the pooled state to three classes.
        tokenizer: of pairs of texts.
        split: sentences of a text.
        batch_size: pairs at once.
    """

    def __init__(self, encoder: Any, head: torch.nn.Linear, tokenizer: Any, split: Split, batch_size: int = 16) -> None:
        self._encoder = encoder.eval()
        self._head = head.eval()
        self._tokenizer = tokenizer
        self._split = split
        self._batch_size = batch_size

    def __call__(self, claims: Sequence[str], contexts: Sequence[str]) -> list[float]:
        """How far each context supports its claim, 0 to 1."""
        return [self._score(claim, context) for claim, context in zip(claims, contexts, strict=True)]

    def _score(self, claim: str, context: str) -> float:
        chunks, sentences = self._chunks(context), self._split(claim) or [claim]
        pairs = [(chunk, sentence) for chunk in chunks for sentence in sentences]
        aligned = torch.cat(
            [self._aligned(pairs[low : low + self._batch_size]) for low in range(0, len(pairs), self._batch_size)]
        )
        return float(aligned.view(len(chunks), len(sentences)).amax(0).mean())

    def _chunks(self, context: str) -> list[str]:
        sentences = self._split(context) or [""]
        n_chunks = len(context.split()) // _WORDS_A_CHUNK + 1
        size = max(len(sentences) // n_chunks, 1)
        return [" ".join(sentences[low : low + size]) for low in range(0, len(sentences), size)]

    @torch.no_grad()
    def _aligned(self, pairs: list[tuple[str, str]]) -> torch.Tensor:
        encoded = self._encode(pairs).to(self._head.weight.device)
        pooled = self._encoder(**encoded).pooler_output
        return self._head(pooled).float().softmax(-1)[:, _ALIGNED].cpu()

    def _encode(self, pairs: list[tuple[str, str]]) -> Any:
        chunks, sentences = map(list, zip(*pairs, strict=True))
        limit = self._tokenizer.model_max_length
        # The context gives way first; a claim that is too long by itself is cut as well.
        claims_fit = all(
            len(ids) < limit - 4 for ids in self._tokenizer(sentences, add_special_tokens=False)["input_ids"]
        )
        truncation = "only_first" if claims_fit else "longest_first"
        return self._tokenizer(
            chunks, sentences, truncation=truncation, max_length=limit, padding=True, return_tensors="pt"
        )


@functools.lru_cache(maxsize=1)
def load_alignscore(
    checkpoint: Path, model: str = "roberta-large", batch_size: int = 16, device: str = "cpu"
) -> AlignScore:
    """AlignScore with the weights of a checkpoint; loaded once for all tasks.

    Args:
        checkpoint: the published file, or its tensors as safetensors. Nothing in it is run.
        model: the RoBERTa that it was trained from, of which only configuration and tokenizer are read.

    Raises:
        ValueError: the file is no such checkpoint, or the model's configuration, tokenizer or device cannot be had.
        ImportError: NLTK or its data for sentences are not installed.
    """
    split = _sentence_splitter()
    weights = _weights(Path(checkpoint))
    encoder, head, tokenizer = _empty_model(model)
    _fill(encoder, _under("base_model.", weights), checkpoint, model)
    _fill(head, _under("tri_layer.", weights), checkpoint, model)
    try:
        return AlignScore(encoder.to(device), head.to(device), tokenizer, split, batch_size)
    except (RuntimeError, AssertionError) as error:  # a PyTorch without CUDA asserts
        raise ValueError(f"AlignScore cannot be put on the device {device!r}: {_first_line(error)}") from None


def _sentence_splitter() -> Split:
    """NLTK's sentences, as in the published runs."""
    tokenize = need("nltk.tokenize").sent_tokenize
    try:
        tokenize("One. Two.")
    except LookupError:
        raise ImportError(
            "AlignScore reads sentence by sentence, and NLTK's data for that is not here: fetch it with "
            "`python -m nltk.downloader punkt_tab`"
        ) from None
    split: Split = tokenize
    return split


def _weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        # weights_only: a checkpoint is a pickle, which can run anything when it is read in full.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"the AlignScore checkpoint {str(path)!r} cannot be read as weights alone: {_first_line(error)}"
        ) from None
    weights = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise ValueError(f"{str(path)!r} is no AlignScore checkpoint: it holds no state_dict of tensors")
    return weights


def _empty_model(name: str) -> tuple[Any, torch.nn.Linear, Any]:
    from transformers import AutoConfig, AutoTokenizer, RobertaModel

    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"AlignScore needs configuration and tokenizer of {name!r}, and they cannot be had ({_first_line(error)}): "
            "give a folder with them as alignscore.model"
        ) from error
    if config.model_type != "roberta":
        raise ValueError(f"AlignScore's weights are those of a RoBERTa, and {name!r} is a {config.model_type}")
    tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_position_embeddings - 2)
    return RobertaModel(config, add_pooling_layer=True), torch.nn.Linear(config.hidden_size, 3), tokenizer


def _fill(module: torch.nn.Module, weights: dict[str, torch.Tensor], checkpoint: Path, model: str) -> None:
    # Old checkpoints list the positions themselves, which are no weights.
    given = {name: weight for name, weight in weights.items() if not name.endswith("position_ids")}
    try:
        module.load_state_dict(given)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{str(checkpoint)!r} is no AlignScore checkpoint of a {model}: {reason}") from None


def _under(prefix: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
