"""Rank correlations of diagnostics over the heads of a model, with two kinds of interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

if TYPE_CHECKING:
    import pandas as pd


# With fewer heads a rank correlation says nothing.
_FEWEST = 3


@dataclass(frozen=True)
class Resampling:
    """How intervals are made.

    Attributes:
        resamples: how many.
        level: confidence level, in (0, 1).
        seed: of the resamples.
    """

    resamples: int = 2000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.resamples < 1 or not 0 < self.level < 1:
            raise ValueError(
                f"resamples={self.resamples}, level={self.level}: use at least one resample and a level between 0 "
                "and 1."
            )


def correlations(
    values: Mapping[str, Float[np.ndarray, "text layer head"]], against: str, how: Resampling
) -> pd.DataFrame:
    """Spearman's correlation of every diagnostic with one of them, over the heads, of means over texts.

    `low, high`: percentile interval over heads that might have been there instead; `texts_low, texts_high`: over texts
    that might have been read instead (NaN for a single text). Heads without a value in one of the two (on no text) are
    left out; `heads` says how many there are.

    Args:
        values: diagnostic -> [text, layer, head], NaN where a text has none.
        against: one of the diagnostics.
        how: resampling.

    Returns:
        A row a diagnostic: spearman, low, high, texts_low, texts_high, heads.

    Raises:
        ValueError: no such diagnostic.
    """
    import pandas as pd

    if against not in values:
        raise ValueError(f"there is no diagnostic {against!r}: choose one of {', '.join(values)}.")
    rows = {
        name: _row(_by_head(value), _by_head(values[against]), how) for name, value in values.items() if name != against
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("diagnostic")


def spearman(
    x: Float[np.ndarray, "*resample head"], y: Float[np.ndarray, "*resample head"]
) -> Float[np.ndarray, "*resample"]:
    """Spearman's correlation along the last axis, ties by mean rank; NaN where either is constant.

    Heads that are NaN in either are left out.

    >>> import numpy as np
    >>> float(spearman(np.array([1.0, 2.0, 4.0]), np.array([0.1, 0.5, 0.9])))
    1.0
    """
    missing = np.isnan(x) | np.isnan(y)
    if missing.any() and x.ndim > 1:
        return np.array([spearman(one, other) for one, other in zip(x, y, strict=True)])
    x, y = (one[~missing] if x.ndim == 1 else one for one in (x, y))
    a, b = (stats.rankdata(one, axis=-1) for one in (x, y))
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    norm = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norm > 0, (a * b).sum(-1) / norm, np.nan)


def mean_over_texts(
    value: Float[np.ndarray, "text head"], times: Int[np.ndarray, "*resample text"] | None = None
) -> Float[np.ndarray, "*resample head"]:
    """Mean over the texts that have a value, each counted so many times (once by default); NaN where none has."""
    there = ~np.isnan(value)
    if times is None:
        times = np.ones(len(value), dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        # an infinite value times 0 would be no number
        finite = np.where(there & np.isfinite(value), value, 0.0)
        infinite = np.where(np.isposinf(value), 1.0, 0.0) - np.where(np.isneginf(value), 1.0, 0.0)
        hit = times @ infinite
        total = times @ finite + np.where(hit != 0, np.sign(hit) * np.inf, 0.0)
        count = times @ there
        return np.where(count > 0, total / count, np.nan)


def _row(x: Float[np.ndarray, "text head"], y: Float[np.ndarray, "text head"], how: Resampling) -> dict[str, float]:
    a, b = mean_over_texts(x), mean_over_texts(y)
    known = ~(np.isnan(a) | np.isnan(b))
    x, y, a, b = x[:, known], y[:, known], a[known], b[known]
    n_texts, n_heads = x.shape
    row = {"spearman": np.nan, "low": np.nan, "high": np.nan, "texts_low": np.nan, "texts_high": np.nan}
    if n_heads >= _FEWEST:
        random = np.random.default_rng(how.seed)
        row["spearman"] = float(spearman(a, b))
        heads = random.integers(n_heads, size=(how.resamples, n_heads))
        row["low"], row["high"] = _ends(spearman(a[heads], b[heads]), how.level)
        if n_texts > 1:
            times = random.multinomial(n_texts, np.full(n_texts, 1 / n_texts), size=how.resamples)
            found = spearman(mean_over_texts(x, times), mean_over_texts(y, times))
            row["texts_low"], row["texts_high"] = _ends(found, how.level)
    return {**row, "heads": n_heads}


def _ends(found: np.ndarray, level: float) -> tuple[float, float]:
    low, high = (
        np.nanquantile(found, [(1 - level) / 2, (1 + level) / 2]) if not np.isnan(found).all() else (np.nan,) * 2
    )
    return float(low), float(high)


def _by_head(value: Float[np.ndarray, "text layer head"]) -> Float[np.ndarray, "text head"]:
    return value.reshape(len(value), -1)
