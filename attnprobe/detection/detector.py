"""A detector of wrong answers: fitted on labelled texts, kept in a file, applied to new text in one call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.special import expit

from attnprobe.detection.array_file import DamagedFile, read_arrays, write_arrays
from attnprobe.detection.evaluation import Evaluation, check_labels, evaluate
from attnprobe.detection.feature_settings import Column, FeatureSettings, Head
from attnprobe.detection.features import Features, features_of
from attnprobe.detection.fingerprint import Fingerprint
from attnprobe.detection.linear import COMPONENTS, Linear, fit_linear
from attnprobe.detection.reading import Text
from attnprobe.hosts import host_of
from attnprobe.metrics import Interval

if TYPE_CHECKING:
    import pandas as pd

_FORMAT = 1
_WHAT = "attnprobe detector"
#: What the probability of a detector is the probability of.
LABEL = "1: the answer is wrong (hallucinated, or unfaithful), 0: it is right"


@dataclass(frozen=True, eq=False)
class Detector:
    """The probability that an answer is wrong, from what the heads of one model do while it reads it.

    Attributes:
        linear: mean and weights of the features.
        settings: which features.
        heads: the (layer, head) pairs that they belong to.
        model: the model that they are of.
        evaluation: how well it did on texts that were held out of the first fit, None where none were.
        texts: how many texts the weights were fitted on.
        longest: the most tokens (prompt and answer) of any of them.
    """

    linear: Linear
    settings: FeatureSettings
    heads: tuple[Head, ...]
    model: Fingerprint
    evaluation: Evaluation | None
    texts: int
    longest: int

    @classmethod
    def fit(
        cls,
        features: Features,
        labels: ArrayLike,
        *,
        groups: Sequence[Hashable] | ArrayLike | None = None,
        test_share: float = 0.2,
        seed: int = 0,
        components: int = COMPONENTS,
    ) -> Detector:
        """Measure on held-out texts how well the features tell, then fit the detector on all of them.

        Args:
            features: of the texts (`features_of`).
            labels: [text] 1 for a wrong answer, 0 for a right one.
            groups: [text] the question of each text, so that no question is both fitted and tested on.
            test_share: of the texts that are held out for `evaluation`; 0 for none.
            seed: of the split.
            components: of PCA, at most.

        Raises:
            ValueError: labels that are not 0 and 1 or all the same, lengths that differ, or texts that cannot be split.

        Source: [LE] arXiv 2502.17598; [SG] arXiv 2610.06012, appendix.
        """
        checked, _ = check_labels(features, labels, groups)
        held = None
        if test_share:
            held = evaluate(features, checked, groups, test_share=test_share, seed=seed, components=components)
        return cls(
            linear=fit_linear(features.values, checked, components),
            settings=features.settings,
            heads=features.heads,
            model=features.model,
            evaluation=held,
            texts=len(features),
            longest=int((features.prompt_tokens + features.answer_tokens).max()),
        )

    @property
    def columns(self) -> tuple[Column, ...]:
        """The set, number, layer and head of every feature."""
        return self.settings.columns(self.heads)

    def weights(self) -> pd.DataFrame:
        """A row a feature: kind, variable, layer, head, and its weight (log-odds a unit of the feature)."""
        import pandas as pd

        return pd.DataFrame(self.columns).assign(weight=self.linear.weights)

    def probability(self, features: Features) -> Float[np.ndarray, "text"]:
        """The probability that each answer is wrong.

        Raises:
            ValueError: the features are not those that the detector was fitted on, or are of another model.
        """
        self.model.check(features.model)
        if features.columns != self.columns:
            raise ValueError(
                f"the detector reads {_described(self.settings, self.heads)}, and these features are "
                f"{_described(features.settings, features.heads)}: use features_of with the settings of the detector."
            )
        found: np.ndarray = expit(self.linear.log_odds(features.values))
        return found

    def predict(self, model: Any, prompt: Text, answer: Text, *, tokenizer: Any = None) -> float:
        """The probability that an answer is wrong: the model reads prompt and answer once, and nothing is generated.

        Args:
            model: the model that the detector was fitted on, under either library.
            prompt, answer: strings, or token ids, as in `features_of`.
            tokenizer: used instead of `model.tokenizer`.

        Returns:
            A number in [0, 1]. The fit was balanced: it is that among as many right answers as wrong ones.

        Raises:
            ValueError: another model, or a text that cannot be read (`features_of`).

        Warns:
            UserWarning: the prompt was too long and lost its middle.
        """
        self.model.check(Fingerprint.of(host_of(model)))
        features = features_of(model, [prompt], [answer], self.settings, progress=False, tokenizer=tokenizer)
        if features.cut[0]:
            warnings.warn(
                f"the prompt is too long for max_tokens={self.settings.max_tokens}: {features.cut[0]} tokens were "
                "taken out of its middle.",
                stacklevel=2,
            )
        return float(self.probability(features)[0])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the detector to one file: arrays and JSON with checksums, no pickle.

        Raises:
            OSError: it cannot be written.
        """
        said = {
            "what": _WHAT,
            "format": _FORMAT,
            "label": LABEL,
            "settings": asdict(self.settings),
            "model": asdict(self.model),
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "intercept": self.linear.intercept,
            "components": self.linear.components,
            "texts": self.texts,
            "longest": self.longest,
        }
        arrays = {"heads": np.array(self.heads), "mean": self.linear.mean, "weights": self.linear.weights}
        write_arrays(Path(path), arrays, said)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Detector:
        """Read a detector; its predictions are those of the one that was saved, to the last bit.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, is no detector, or is of another version of the format.
        """
        path = Path(path)
        arrays, said = read_arrays(path)
        if said.get("what") != _WHAT:
            raise ValueError(f"{path.name} is no detector: it holds {', '.join(arrays) or 'nothing'}.")
        if said.get("format") != _FORMAT:
            raise ValueError(
                f"{path.name} is of format {said.get('format')!r}, and this version of attnprobe reads {_FORMAT}."
            )
        try:
            detector = cls._of(arrays, said)
            n = len(detector.columns)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(f"{path.name} is damaged: {error}.") from error
        for name, array in (("mean", detector.linear.mean), ("weights", detector.linear.weights)):
            if array.shape != (n,) or array.dtype != np.float64 or not np.isfinite(array).all():
                raise DamagedFile(
                    f"{path.name} is damaged: its {name} should be {n} finite numbers and are {array.dtype} of shape "
                    f"{array.shape}."
                )
        return detector

    @classmethod
    def _of(cls, arrays: Mapping[str, np.ndarray], said: Mapping[str, Any]) -> Detector:
        settings = dict(said["settings"])
        if settings["heads"] != "all":
            settings["heads"] = [tuple(pair) for pair in settings["heads"]]
        held = said["evaluation"]
        if held is not None:
            held = Evaluation(**{**held, "auroc": Interval(**held["auroc"])})
        linear = Linear(arrays["mean"], arrays["weights"], float(said["intercept"]), int(said["components"]))
        return cls(
            linear=linear,
            settings=FeatureSettings(**settings),
            heads=tuple((int(layer), int(head)) for layer, head in arrays["heads"]),
            model=Fingerprint(**said["model"]),
            evaluation=held,
            texts=int(said["texts"]),
            longest=int(said["longest"]),
        )

    def __repr__(self) -> str:
        what = f"Detector({_described(self.settings, self.heads)}, fitted on {self.texts} texts"
        if self.evaluation is None:
            return f"{what})"
        auroc = self.evaluation.auroc
        held = f"AUROC {auroc.estimate:.3f} [{auroc.low:.3f}, {auroc.high:.3f}] on {self.evaluation.test} held out"
        return f"{what}, {held})"


def _described(settings: FeatureSettings, heads: Sequence[Head]) -> str:
    return f"{'+'.join(settings.kinds)} (k={settings.k}) of {len(heads)} heads"
