"""LM-Polygraph's statistics of one prompt, made from our samples and our NLI model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnprobe.functional.semantic import semantic_classes
from attnprobe.uncertainty.nli import EntailmentModel
from attnprobe.uncertainty.sampled import Comparison, Samples

# A batch of one prompt: every value has a leading axis, or outer list, of one.
_FROM_SAMPLES: dict[str, Callable[[Samples], Any]] = {
    "sample_texts": lambda samples: [samples.texts],
    # with the token that ended the answer: its probability is in sample_log_probs too
    "sample_tokens": lambda samples: [[list(sample.token_ids) for sample in samples.samples]],
    "sample_log_probs": lambda samples: [samples.log_probability.tolist()],
}
_FROM_COMPARISON: dict[str, Callable[[Comparison], Any]] = {
    "semantic_matrix_entail": lambda compared: compared.logits.softmax(-1)[None, ..., 0].numpy(),
    "semantic_matrix_entail_logits": lambda compared: compared.entailment[None].numpy(),
    "semantic_matrix_contra": lambda compared: compared.logits.softmax(-1)[None, ..., 2].numpy(),
    "semantic_matrix_contra_logits": lambda compared: compared.contradiction[None].numpy(),
    "semantic_matrix_classes": lambda compared: _labels(compared),
    "semantic_classes_entail": lambda compared: _classes(compared),
    "entailment_id": lambda compared: 0,
}
_OF_CONTRADICTION = frozenset({"semantic_matrix_contra", "semantic_matrix_contra_logits"})

# What can be had, by LM-Polygraph's names.
KNOWN = (*_FROM_SAMPLES, *_FROM_COMPARISON)


def compares(names: list[str]) -> bool:
    """Whether any of these statistics takes an NLI model."""
    return any(name in _FROM_COMPARISON for name in names)


def tells_contradiction(names: list[str]) -> bool:
    """Whether any of these statistics takes an NLI model that knows contradiction."""
    return any(name in _OF_CONTRADICTION for name in names)


def statistics(names: list[str], samples: Samples, nli: Callable[[], EntailmentModel]) -> dict[str, Any]:
    """The named statistics.

    Args:
        names: each in `KNOWN`.
        samples: the answers.
        nli: gives the NLI model; called only where one is needed.
    """
    found = {name: _FROM_SAMPLES[name](samples) for name in names if name in _FROM_SAMPLES}
    if compares(names):
        compared = samples.compared_by(nli())
        found |= {name: _FROM_COMPARISON[name](compared) for name in names if name in _FROM_COMPARISON}
    return found


def _labels(compared: Comparison) -> np.ndarray:
    """[1, i, j] number of the label; that a text entails itself is no matter of the NLI model."""
    labels = compared.logits.argmax(-1).masked_fill(compared.same_text, 0)
    return labels[None].numpy()


def _classes(compared: Comparison) -> dict[str, dict[int, Any]]:
    classes = semantic_classes(compared.entails).tolist()
    members = [[i for i, own in enumerate(classes) if own == number] for number in range(max(classes) + 1)]
    return {"sample_to_class": {0: dict(enumerate(classes))}, "class_to_sample": {0: members}}
