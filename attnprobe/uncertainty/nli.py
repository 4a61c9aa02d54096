"""Natural-language inference between answers: does one entail another, or contradict it?"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

DEFAULT_MODEL = "microsoft/deberta-large-mnli"
# The columns of logits, in this order, whatever order the checkpoint has them in.
THREE_LABELS = ("entailment", "neutral", "contradiction")
TWO_LABELS = ("entailment", "not_entailment")


@runtime_checkable
class EntailmentModel(Protocol):
    """What sampled methods ask of an NLI model: `NLI`, or an object of your own."""

    def matrix(self, texts: Sequence[str]) -> Float[Tensor, "premise hypothesis label"]:
        """Logits for every ordered pair of texts: of entailment, neutral, contradiction, or of entailment and its
        opposite."""


class NLI:
    """A sequence-classification checkpoint of transformers that tells entailment.

    It is loaded at first use, and kept. Code that comes with a checkpoint is never run.

    Args:
        model: a hub name, a local directory, or a loaded model, which stays where it is and as it is.
        tokenizer: used instead of the checkpoint's own; needed with a loaded model.
        labels: which output is which, such as {"entailment": 2, "neutral": 1, "contradiction": 0}; by default the
            checkpoint's label names say so. A checkpoint may have "entailment" and "not_entailment" alone.
        device: for example "cpu" or "cuda:1"; by default CUDA where there is one.
        batch_size: pairs a forward.
        max_length: tokens a pair; longer ones are cut with a warning. By default what the model can read, which is
            any length where positions are relative, as in DeBERTa.

    Raises:
        ValueError, TypeError: arguments that make no sense, in one sentence.

    >>> nli = NLI("path/or/hub-name", batch_size=8)
    >>> nli.matrix(["Paris.", "It is Paris."])  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        labels: Mapping[str, int] | None = None,
        device: str | torch.device | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r}: use a whole number of at least 1.")
        if isinstance(model, str | os.PathLike):
            model = os.fspath(model)
            if not model.strip():
                raise ValueError("the name of the NLI model is empty.")
        else:
            _check_loaded(model, tokenizer, device)
        self.model = model
        self.tokenizer = tokenizer
        self.labels = None if labels is None else dict(labels)
        self.device = device
        self.batch_size = batch_size
        self.max_length = max_length

    def __repr__(self) -> str:
        return f"NLI({self.model if isinstance(self.model, str) else type(self.model).__name__!r})"

    def load(self) -> NLI:
        """Load the checkpoint now rather than at first use; gives itself.

        Raises:
            OSError: it is neither on this machine nor reachable.
            ValueError: it is none that transformers reads, or its labels do not say which is which.
        """
        _ = self._classifier
        return self

    @property
    def label_names(self) -> tuple[str, ...]:
        """The columns of logits: `THREE_LABELS` or `TWO_LABELS`."""
        return self._classifier.names

    def logits(self, premises: Sequence[str], hypotheses: Sequence[str]) -> Float[Tensor, "pair label"]:
        """Logits of each pair, columns as `label_names`; on the CPU, in float32 or more.

        Raises:
            ValueError: numbers of premises and hypotheses that differ, or labels that do not say which is which.
            OSError: the checkpoint is neither on this machine nor reachable.

        Warns:
            UserWarning: pairs were cut to `max_length`; the sentence has their number.
        """
        if len(premises) != len(hypotheses):
            raise ValueError(f"there are {len(premises)} premises for {len(hypotheses)} hypotheses: give one for each.")
        if not premises:
            raise ValueError("there is no pair of texts to compare.")
        classifier = self._classifier
        limit = self.max_length if self.max_length is not None else classifier.limit
        lengths = classifier.lengths(premises, hypotheses)
        _warn_of_cut_pairs(lengths, limit)
        # pairs of like length share a batch, so that little of it is padding
        order = sorted(range(len(lengths)), key=lambda pair: -lengths[pair])
        found = []
        for low in range(0, len(order), self.batch_size):
            batch = order[low : low + self.batch_size]
            found.append(classifier([premises[i] for i in batch], [hypotheses[i] for i in batch], limit))
        return torch.cat(found)[torch.tensor(order).argsort()]

    def matrix(self, texts: Sequence[str]) -> Float[Tensor, "premise hypothesis label"]:
        """Logits [i, j] of premise i and hypothesis j; each distinct ordered pair is computed once.

        Raises, Warns: as `logits`.
        """
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            raise ValueError("there is no text to compare.")
        pairs = list(itertools.product(distinct, distinct))
        logits = self.logits([premise for premise, _ in pairs], [hypothesis for _, hypothesis in pairs])
        square = logits.reshape(len(distinct), len(distinct), -1)
        which = torch.tensor([distinct.index(text) for text in texts])
        return square[which[:, None], which]

    @functools.cached_property
    def _classifier(self) -> _Classifier:
        if isinstance(self.model, str):
            model, tokenizer = _load(self.model, self.tokenizer, self.device)
        else:
            model, tokenizer = self.model, self.tokenizer
        names, columns = _columns(model.config, self.labels, repr(self))
        return _Classifier(model, tokenizer, names, columns)


@functools.cache
def shared_nli(name: str = DEFAULT_MODEL) -> NLI:
    """The NLI model of that name with default settings: one a process, so that it is loaded once."""
    return NLI(name)


@dataclass(frozen=True)
class _Classifier:
    """A loaded model: its tokenizer, the names of its labels in our order, and where they are in its output."""

    model: Any
    tokenizer: Any
    names: tuple[str, ...]
    columns: list[int]

    def __call__(self, premises: list[str], hypotheses: list[str], limit: int | None) -> Float[Tensor, "pair label"]:
        encoded = self.tokenizer(
            premises,
            hypotheses,
            padding=True,
            truncation="longest_first" if limit is not None else False,
            max_length=limit,
            return_tensors="pt",
            verbose=False,
        )
        with torch.no_grad():
            logits = self.model(**encoded.to(self.model.device)).logits
        picked = logits[:, torch.tensor(self.columns, device=logits.device)].cpu()
        return picked.to(torch.promote_types(picked.dtype, torch.float32))

    def lengths(self, premises: Sequence[str], hypotheses: Sequence[str]) -> list[int]:
        """Tokens of each pair, uncut."""
        encoded = self.tokenizer(list(premises), list(hypotheses), truncation=False, verbose=False)
        return [len(ids) for ids in encoded["input_ids"]]

    @property
    def limit(self) -> int | None:
        """How many tokens the model has positions for; None where positions are relative."""
        config = self.model.config
        if getattr(config, "relative_attention", False) and not getattr(config, "position_biased_input", True):
            return None
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and "roberta" in str(config.model_type):
            positions -= config.pad_token_id + 1  # these count positions from behind the padding id
        told = getattr(self.tokenizer, "model_max_length", None)
        known = [int(n) for n in (positions, told) if n is not None and n < 1_000_000]  # a tokenizer says 1e30 for any
        return min(known, default=None)


def _warn_of_cut_pairs(lengths: list[int], limit: int | None) -> None:
    long = 0 if limit is None else sum(length > limit for length in lengths)
    if long:
        warnings.warn(
            f"{long} of {len(lengths)} pairs of answers have more than {limit} tokens and were cut for the NLI model: "
            "ask for shorter answers, or take a model that reads more.",
            stacklevel=3,
        )


def _check_loaded(model: Any, tokenizer: Any, device: Any) -> None:
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            f"an NLI model is a hub name, a folder or a loaded transformers model, not {type(model).__name__}."
        )
    if tokenizer is None:
        raise ValueError("a loaded NLI model needs its tokenizer: pass tokenizer=.")
    if device is not None:
        raise ValueError("a loaded NLI model stays where it is: leave out device=, or move it before.")
    if model.training:
        raise ValueError("this NLI model is in training mode, where dropout changes its answers: call model.eval().")


def _load(name: str, tokenizer: Any, device: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=False)
    except OSError as error:
        raise OSError(
            f"the NLI model {name!r} was not found on this machine and could not be fetched from the model hub "
            f"({_first_line(error)}): pass nli=NLI(...) with a local folder, or an object with a method matrix(texts)."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{name!r} is not an NLI model that transformers reads by itself ({_first_line(error)})."
        ) from error
    return model.to(device).eval(), tokenizer


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__


def _columns(config: Any, labels: dict[str, int] | None, what: str) -> tuple[tuple[str, ...], list[int]]:
    """Names in our order, and the output number of each."""
    own = {int(number): str(label) for number, label in (config.id2label or {}).items()}
    given = labels if labels is not None else {label: number for number, label in own.items()}
    found = {_plain(label): number for label, number in given.items()}
    for names in (THREE_LABELS, TWO_LABELS):
        if set(found) == set(names):
            columns = [found[name] for name in names]
            if sorted(columns) != list(range(config.num_labels)):
                raise ValueError(
                    f"labels={dict(given)!r} do not number the {config.num_labels} outputs of {what}: give each its "
                    "own, from 0."
                )
            return names, columns
    listed = ", ".join(map(str, given))
    raise ValueError(
        f"the labels of {what} are {listed}, which do not say what is entailment: pass "
        'labels={"entailment": 2, "neutral": 1, "contradiction": 0} with the numbers of this model (or "entailment" '
        'and "not_entailment").'
    )


def _plain(label: str) -> str:
    """A label as we write it: "Not entailment" and "NOT-ENTAILMENT" are "not_entailment"."""
    return str(label).strip().lower().replace("-", "_").replace(" ", "_")
