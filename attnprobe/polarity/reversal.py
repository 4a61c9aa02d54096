"""Does polarity reverse between two data sets?

The prediction of [ST] that can fail. Three answers, each for every kind of AUROC that both data sets have:

- feature by feature: opposite sides of 1/2, both more than chance would give. The p-value is the larger one of the two
  one-sided p-values, for the sides that are seen, and 1 where the sides are the same.
- all heads of a quantity together: the cosine between the two profiles AUROC - 1/2. -1 is a full reversal, 1 full
  agreement.
- how many heads lie on opposite, and on the same sides, both beyond 1.96 standard deviations of their permuted values.

For the last two the labels of one data set are permuted and the other is left as it is; of the two p-values that gives
the larger one counts. That the labels of one data set mean nothing is thus ruled out for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from jaxtyping import Float

from attnprobe.metrics import holm_correction
from attnprobe.polarity.study import Comparison, Polarity, adjusted

_SIGNIFICANT = 1.96
# Permuted AUROCs are kept in float32: cosines that are this near are the same.
_ROUNDING = 1e-5
_HEADS = ("phi", "cut", "asymmetry", "gradient", "curl")


@dataclass(frozen=True, eq=False)
class Reversal:
    """Two data sets beside each other.

    Attributes:
        first, second: what was found on each.
    """

    first: Polarity
    second: Polarity

    def __post_init__(self) -> None:
        if not self.first.names.equals(self.second.names):
            raise ValueError("the two data sets were read by models of different layers or heads: use one model.")

    @property
    def kinds(self) -> list[str]:
        """Kinds of AUROC that both data sets have."""
        return [kind for kind in self.first.comparisons if kind in self.second.comparisons]

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row a feature and kind: kind, level, quantity, layer, head, auroc_1, auroc_2, opposite, p, p_adjusted,
        reversed."""
        frames = []
        for kind in self.kinds:
            a, b = self.first.comparisons[kind], self.second.comparisons[kind]
            p = reversal_p(a, b)
            corrected = adjusted(p, self.first.names["level"].to_numpy())
            frames.append(
                self.first.names.assign(
                    kind=kind,
                    auroc_1=a.auroc,
                    auroc_2=b.auroc,
                    opposite=a.polarity * b.polarity < 0,
                    p=p,
                    p_adjusted=corrected,
                    reversed=corrected <= self.first.settings.alpha,
                )
            )
        table = pd.concat(frames, ignore_index=True)
        table.insert(0, "kind", table.pop("kind"))
        return table

    @cached_property
    def profiles(self) -> pd.DataFrame:
        """A row a kind and quantity of heads: kind, quantity, heads, cosine, p_reversal, p_reversal_adjusted (Holm over
        quantities), p_agreement, opposite, p_opposite, same."""
        heads = self.first.names["level"] == "head"
        rows = []
        for kind in self.kinds:
            of_kind = []
            for quantity in _HEADS:
                which = np.flatnonzero(heads & (self.first.names["quantity"] == quantity))
                found = _profile(self.first.comparisons[kind], self.second.comparisons[kind], which)
                of_kind.append({"kind": kind, "quantity": quantity, "heads": len(which), **found})
            corrected = holm_correction([row["p_reversal"] for row in of_kind])
            rows += [{**row, "p_reversal_adjusted": p} for row, p in zip(of_kind, corrected, strict=True)]
        return pd.DataFrame(rows)


def reversal_p(a: Comparison, b: Comparison) -> Float[np.ndarray, "feature"]:
    """p-value of opposite polarities: max of the one-sided p-values of the sides seen; 1 for the same side.

    Its level holds whatever one of the two effects is, because the other one alone has to be significant too.

    Source: the likelihood-ratio test of qualitative interaction of two groups (Gail and Simon 1985), an
    intersection-union test (Berger 1982).
    """
    outwards = np.where(a.polarity > 0, np.fmax(a.p_up, b.p_down), np.fmax(a.p_down, b.p_up))
    p = np.where(a.polarity * b.polarity < 0, outwards, 1.0)
    return np.where(np.isnan(a.auroc) | np.isnan(b.auroc), np.nan, p)


def _profile(a: Comparison, b: Comparison, which: np.ndarray) -> dict[str, float | int]:
    one, two = (found.auroc[which] - 0.5 for found in (a, b))
    if np.isnan(one).any() or np.isnan(two).any():
        nothing = dict.fromkeys(("cosine", "p_reversal", "p_agreement", "p_opposite"), float("nan"))
        return {**nothing, "opposite": 0, "same": 0}
    null_one, null_two = (found.null[:, which] - np.float32(0.5) for found in (a, b))
    cosine = float(_cosines(one[None], two)[0])
    permuted = (_cosines(null_one, two), _cosines(null_two, one))
    sides = _sides(one, null_one), _sides(two, null_two)
    null_sides = _sides(null_one, null_one), _sides(null_two, null_two)
    product = sides[0] * sides[1]
    opposite = int((product < 0).sum())
    counts = ((null_sides[0] * sides[1] < 0).sum(1), (null_sides[1] * sides[0] < 0).sum(1))
    return {
        "cosine": cosine,
        "p_reversal": max(_share(null <= cosine + _ROUNDING) for null in permuted),
        "p_agreement": max(_share(null >= cosine - _ROUNDING) for null in permuted),
        "opposite": opposite,
        "p_opposite": max(_share(null >= opposite) for null in counts),
        "same": int((product > 0).sum()),
    }


def _cosines(profiles: Float[np.ndarray, "row head"], profile: Float[np.ndarray, "head"]) -> Float[np.ndarray, "row"]:
    norms = np.linalg.norm(profiles, axis=1) * np.linalg.norm(profile)
    return np.divide(profiles @ profile, norms, out=np.zeros(len(profiles)), where=norms > 0)


def _sides(deviation: Float[np.ndarray, "*row head"], null: Float[np.ndarray, "permutation head"]) -> np.ndarray:
    """-1, 0 or 1: the side of 1/2, 0 within 1.96 standard deviations of the permuted values."""
    return (np.sign(deviation) * (np.abs(deviation) > _SIGNIFICANT * null.std(0))).astype(np.int8)


def _share(extreme: np.ndarray) -> float:
    return float((1 + extreme.sum()) / (1 + len(extreme)))
