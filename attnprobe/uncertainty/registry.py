"""Names of scores."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from attnprobe.uncertainty.attention_score import AttentionScore
from attnprobe.uncertainty.method import Method
from attnprobe.uncertainty.rauq import RAUQ
from attnprobe.uncertainty.sampled import SampledMethod
from attnprobe.uncertainty.sauq import SAUQ
from attnprobe.uncertainty.semantic import LUQ, SemanticEntropy
from attnprobe.uncertainty.spectral_rauq import LapEigValRAUQ, LogDetRAUQ
from attnprobe.uncertainty.token_scores import (
    MaximumSequenceProbability,
    MaximumTokenEntropy,
    MeanTokenEntropy,
    Perplexity,
)

AnyMethod = Method | SampledMethod

_SAMPLED: dict[str, Callable[[], SampledMethod]] = {"SemanticEntropy": SemanticEntropy, "LUQ": LUQ}
_METHODS: dict[str, Callable[[], Method]] = {
    "SAUQ": SAUQ,
    "SAUQ-generation": lambda: SAUQ(scope="generation"),
    "SAUQ-counting": lambda: SAUQ(measure="counting"),
    "SAUQ-positional": lambda: SAUQ(measure="positional"),
    "SAUQ-zipf": lambda: SAUQ(measure="zipf"),
    "SAUQ-unembedding": lambda: SAUQ(measure="unembedding"),
    "RAUQ": RAUQ,
    "RAUQ-entropy": lambda: RAUQ(entropy=True),
    "RAUQ-paper": lambda: RAUQ(indexing="paper"),
    "RAUQ-entropy-paper": lambda: RAUQ(entropy=True, indexing="paper"),
    "LapEigValRAUQ": LapEigValRAUQ,
    "LogDetRAUQ": LogDetRAUQ,
    "Perplexity": Perplexity,
    "MaximumSequenceProbability": MaximumSequenceProbability,
    "MeanTokenEntropy": MeanTokenEntropy,
    "MaximumTokenEntropy": MaximumTokenEntropy,
    "AttentionScore": AttentionScore,
}


def method_names(*, sampled: bool = True) -> list[str]:
    """The names `score` understands; other settings go in as objects such as `SAUQ(alpha=0.5)`."""
    return [*_METHODS, *(_SAMPLED if sampled else ())]


def method_named(name: str) -> AnyMethod:
    """The score of that name with its default settings.

    Raises:
        ValueError: no such score; the sentence names the nearest and all.
    """
    known: dict[str, Callable[[], AnyMethod]] = {**_METHODS, **_SAMPLED}
    if name not in known:
        lower = {one.lower(): one for one in known}
        near = [lower[one] for one in difflib.get_close_matches(name.lower(), lower, n=1)]
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no method {name!r}: {hint}there are {', '.join(known)}.")
    return known[name]()


def resolve(methods: str | AnyMethod | Iterable[str | AnyMethod]) -> list[AnyMethod]:
    """Names and objects to objects, in order.

    Raises:
        ValueError: an unknown name, none at all, or one name twice.
        TypeError: something else.
    """
    if not isinstance(methods, str | AnyMethod | type | Iterable):
        raise TypeError(f"methods must be names or Method objects, not {methods!r}.")
    given: list[Any] = [methods] if isinstance(methods, str | AnyMethod | type) else list(methods)
    for method in given:
        if isinstance(method, type) and issubclass(method, AnyMethod):
            raise TypeError(f"{method.__name__} is a class: write {method.__name__}() to make a method.")
        if not isinstance(method, str | AnyMethod):
            raise TypeError(f"{method!r} is neither the name of a method nor a Method object.")
    resolved = [method_named(method) if isinstance(method, str) else method for method in given]
    names = [method.name for method in resolved]
    if not names:
        raise ValueError(f"methods is empty: name at least one of {', '.join(method_names())}.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"methods names {', '.join(twice)} twice: give one of them another name (`method.name = ...`)."
        )
    return resolved
