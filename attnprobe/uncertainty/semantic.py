"""Scores of what sampled answers mean: semantic entropy and LUQ."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from attnprobe.functional.semantic import (
    CLASS_PROBABILITIES,
    ESTIMATES,
    luq,
    semantic_classes,
    semantic_entropy,
)
from attnprobe.uncertainty.nli import EntailmentModel
from attnprobe.uncertainty.sampled import NO_CONTRADICTION, SampledAssessment, SampledMethod, Samples


class SemanticEntropy(SampledMethod):
    """Entropy over the meanings of sampled answers, nats.

    Answers that entail one another form a class (`attnprobe.functional.semantic_classes`); the score is the mean over
    answers of -log P(own class), P being the sum of the members' probabilities
    (`attnprobe.functional.semantic_entropy`).

    Args:
        estimate: "mean" (default) or "direct", the sum over answers of -P log P.
        class_probability: "sum" (default) of the members' probabilities, or "frequency", the share of the answers,
            which reads no probability.
        unique_texts: a text that was sampled several times counts once into the probability of its class.
        n_samples, temperature, top_k, top_p, nli: as in `SampledMethod`.

    Raises:
        ValueError, TypeError: an unknown option.

    >>> import attnprobe as ap
    >>> ap.SemanticEntropy().name, ap.SemanticEntropy(estimate="direct", n_samples=5).name
    ('SemanticEntropy', 'SemanticEntropy-direct-n5')

    Source: Kuhn et al. 2023, arXiv 2302.09664; the options as in LM-Polygraph 0.7.0.
    """

    def __init__(
        self,
        *,
        estimate: str = "mean",
        class_probability: str = "sum",
        unique_texts: bool = False,
        n_samples: int = 10,
        temperature: float = 1.0,
        top_k: int | None = 50,
        top_p: float | None = None,
        nli: EntailmentModel | str | None = None,
    ) -> None:
        super().__init__(n_samples=n_samples, temperature=temperature, top_k=top_k, top_p=top_p, nli=nli)
        if estimate not in ESTIMATES:
            raise ValueError(f"unknown estimate {estimate!r}: use {' or '.join(map(repr, ESTIMATES))}.")
        if class_probability not in CLASS_PROBABILITIES:
            known = " or ".join(map(repr, CLASS_PROBABILITIES))
            raise ValueError(f"unknown class_probability {class_probability!r}: use {known}.")
        if unique_texts and class_probability == "frequency":
            raise ValueError("unique_texts leaves repetitions out, and class_probability='frequency' counts them.")
        self.estimate = estimate
        self.class_probability = class_probability
        self.unique_texts = unique_texts
        self.name = self._named(
            "SemanticEntropy",
            "direct" if estimate == "direct" else "",
            "frequency" if class_probability == "frequency" else "",
            "unique" if unique_texts else "",
        )

    def assess_samples(self, samples: Samples) -> SampledAssessment:
        classes = semantic_classes(samples.compared_by(self.nli).entails)
        uncertainty = semantic_entropy(
            samples.log_probability,
            classes,
            estimate=self.estimate,
            class_probability=self.class_probability,
            counted=first_of_each(samples.texts, classes) if self.unique_texts else None,
        )
        return SampledAssessment(float(uncertainty), samples=samples.samples, classes=tuple(classes.tolist()))


class LUQ(SampledMethod):
    """How little sampled answers support one another, in [0, 1] (`attnprobe.functional.luq`).

    Reads no probabilities of the model. It needs an NLI model that tells contradiction, and at least two samples.

    Args:
        n_samples, temperature, top_k, top_p, nli: as in `SampledMethod`.

    Raises:
        ValueError, TypeError: settings that make no sense.

    >>> import attnprobe as ap
    >>> ap.LUQ().name, ap.LUQ(temperature=0.7).name
    ('LUQ', 'LUQ-temperature0.7')

    Source: Zhang et al. 2024, arXiv 2403.20279, with whole answers in place of their sentences, as in LM-Polygraph
    0.7.0.
    """

    def __init__(
        self,
        *,
        n_samples: int = 10,
        temperature: float = 1.0,
        top_k: int | None = 50,
        top_p: float | None = None,
        nli: EntailmentModel | str | None = None,
    ) -> None:
        super().__init__(n_samples=n_samples, temperature=temperature, top_k=top_k, top_p=top_p, nli=nli)
        if n_samples < 2:
            raise ValueError("LUQ compares answers with one another: n_samples must be at least 2.")
        self.name = self._named("LUQ")

    def prepare(self) -> None:
        super().prepare()
        if "contradiction" not in getattr(self.nli, "label_names", ["contradiction"]):
            raise ValueError(NO_CONTRADICTION)

    def assess_samples(self, samples: Samples) -> SampledAssessment:
        compared = samples.compared_by(self.nli)
        uncertainty = luq(compared.entailment, compared.contradiction)
        return SampledAssessment(float(uncertainty), samples=samples.samples)


def first_of_each(texts: list[str], classes: Tensor) -> Bool[Tensor, "sample"]:
    """[N] whether an answer is the first of its text within its class."""
    keys = list(zip(classes.tolist(), texts, strict=True))
    return torch.tensor([keys.index(key) == i for i, key in enumerate(keys)])
