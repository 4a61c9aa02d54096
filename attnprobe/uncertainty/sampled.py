"""What a score of sampled answers is: how answers are sampled, how they compare, and a number from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnprobe.uncertainty.method import Assessment
from attnprobe.uncertainty.nli import EntailmentModel, shared_nli
from attnprobe.uncertainty.sampling import Sample, SamplingSettings

NO_CONTRADICTION = (
    "LUQ needs an NLI model that tells contradiction, and this one has entailment and not_entailment only."
)


@dataclass(frozen=True)
class SampledAssessment(Assessment):
    """A score of several sampled answers; higher = less certain.

    Attributes:
        samples: the answers it was computed from.
        classes: the semantic class of each, for scores that form classes.
    """

    samples: tuple[Sample, ...] = field(default=(), repr=False)
    classes: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Comparison:
    """What an NLI model says of every ordered pair of answers; answer i is the premise, j the hypothesis.

    Attributes:
        logits: [i, j, label] of entailment, neutral, contradiction, or of entailment and its opposite.
        same_text: [i, j] the two answers are the same text.
    """

    logits: Float[Tensor, "sample sample label"]
    same_text: Bool[Tensor, "sample sample"]

    @property
    def entails(self) -> Bool[Tensor, "sample sample"]:
        """Entailment is the most probable label, alone; a text entails itself whatever the model says."""
        return (self.logits[..., 0] > self.logits[..., 1:].amax(-1)) | self.same_text

    @property
    def entailment(self) -> Float[Tensor, "sample sample"]:
        """Logits of entailment."""
        return self.logits[..., 0]

    @property
    def contradiction(self) -> Float[Tensor, "sample sample"]:
        """Logits of contradiction.

        Raises:
            ValueError: the model has no such label.
        """
        if self.logits.shape[-1] != 3:
            raise ValueError(NO_CONTRADICTION)
        return self.logits[..., 2]


class Samples:
    """The sampled answers to one prompt. Each NLI model compares them once, whoever asks.

    Attributes:
        samples: the answers.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        if not samples:
            raise ValueError("there are no samples to score.")
        self.samples = tuple(samples)
        self._compared: dict[int, tuple[Any, Comparison]] = {}  # the model is kept, so that its id stays its own

    @property
    def texts(self) -> list[str]:
        """The text of each answer."""
        return [sample.text for sample in self.samples]

    @property
    def log_probability(self) -> Float[Tensor, "sample"]:
        """Of each whole answer, nats, float64."""
        return torch.tensor([sample.log_probability for sample in self.samples], dtype=torch.float64)

    def compared_by(self, nli: EntailmentModel) -> Comparison:
        """What the NLI model says of every ordered pair.

        Raises:
            ValueError: its matrix has another shape, or is not finite.
        """
        if id(nli) not in self._compared:
            self._compared[id(nli)] = (nli, self._compare(nli))
        return self._compared[id(nli)][1]

    def _compare(self, nli: EntailmentModel) -> Comparison:
        texts = self.texts
        logits = torch.as_tensor(nli.matrix(texts)).detach().cpu()
        n = len(texts)
        if tuple(logits.shape) not in {(n, n, 3), (n, n, 2)}:
            raise ValueError(
                f"the NLI model gave a matrix of shape {tuple(logits.shape)} for {n} answers: it must be ({n}, {n}, 3) "
                f"with entailment, neutral, contradiction, or ({n}, {n}, 2) with entailment and its opposite."
            )
        if not logits.isfinite().all():
            raise ValueError("the NLI model gave logits that are not finite.")
        same = torch.tensor([[one == other for other in texts] for one in texts])
        return Comparison(logits.double(), same)


class SampledMethod:
    """Base class of scores that sample several answers to a prompt and compare what they say.

    Methods with equal sampling settings are computed from the same samples, and those with the same NLI model from
    the same comparison.

    Args:
        n_samples: answers sampled for each prompt.
        temperature, top_k, top_p: shape what is sampled; log-probabilities are the model's own, before these. None
            leaves a bound out.
        nli: an `NLI` (or an object of your own with `matrix(texts)`), or the name or folder of a checkpoint, which is
            loaded once a process; by default microsoft/deberta-large-mnli.

    Attributes:
        name: how the score is called in results.

    Raises:
        ValueError, TypeError: settings that make no sense, in one sentence.
    """

    name: str

    def __init__(
        self,
        *,
        n_samples: int = 10,
        temperature: float = 1.0,
        top_k: int | None = 50,
        top_p: float | None = None,
        nli: EntailmentModel | str | None = None,
    ) -> None:
        self.settings = SamplingSettings(n_samples, temperature, top_k, top_p)
        if not (
            nli is None or isinstance(nli, str) or (isinstance(nli, EntailmentModel) and not isinstance(nli, type))
        ):
            raise TypeError(
                f"nli={nli!r}: give an NLI, the name or folder of a checkpoint, or an object with matrix(texts)."
            )
        self._nli = nli

    @property
    def n_samples(self) -> int:
        """Answers sampled for each prompt."""
        return self.settings.n_samples

    @property
    def temperature(self) -> float:
        """Logits are divided by it before sampling."""
        return self.settings.temperature

    @property
    def top_k(self) -> int | None:
        """Only so many of the most probable tokens can be drawn; None for all."""
        return self.settings.top_k

    @property
    def top_p(self) -> float | None:
        """Only the most probable tokens of this total probability can be drawn; None for all."""
        return self.settings.top_p

    @property
    def nli(self) -> EntailmentModel:
        """The NLI model."""
        if self._nli is None:
            return shared_nli()
        return shared_nli(self._nli) if isinstance(self._nli, str) else self._nli

    def prepare(self) -> None:
        """Load the NLI model, where it can be loaded ahead; `score` does so before anything is generated.

        Raises:
            OSError, ValueError: it cannot be had, or cannot serve this score.
        """
        load = getattr(self.nli, "load", None)
        if callable(load):
            load()

    def assess_samples(self, samples: Samples) -> Assessment:
        """The score of one prompt's samples."""
        raise NotImplementedError

    def _named(self, name: str, *options: str) -> str:
        """The name with whatever is not the default in it."""
        default = SamplingSettings()
        settings = [
            f"{short}{getattr(self.settings, field)}"
            for field, short in (("n_samples", "n"), ("temperature", "temperature"), ("top_k", "k"), ("top_p", "p"))
            if getattr(self.settings, field) != getattr(default, field)
        ]
        return "-".join([name, *filter(None, options), *settings])
