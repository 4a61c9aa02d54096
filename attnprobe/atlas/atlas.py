"""`head_atlas`: what every head of a model does, over many texts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from attnprobe.analyzers import Analyzer
from attnprobe.atlas.correlation import Resampling, correlations, mean_over_texts
from attnprobe.atlas.reading import Readings, default_diagnostics, read_heads
from attnprobe.atlas.roles import NEEDED, Roles, RoleThresholds, roles_of
from attnprobe.atlas.texts import Text, named_texts

if TYPE_CHECKING:
    import pandas as pd

#: what others are correlated with, where it is there: attention to the first token, and H(AV)
AGAINST = ("sink_score", "entropy")


@dataclass(frozen=True, eq=False)
class HeadAtlas:
    """The heads of a model, over the texts that it read.

    Attributes:
        readings: the values of every head on every text.
        thresholds: of the roles.
        resampling: of the intervals.
    """

    readings: Readings
    thresholds: RoleThresholds
    resampling: Resampling

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row a head, by (layer, head): mean over texts of every diagnostic, its standard error as `..._se`, the
        role (where the diagnostics that tell it are there). A standard error is NaN for fewer than two texts."""
        import pandas as pd

        columns: dict[str, np.ndarray] = {}
        for name, value in self.readings.values.items():
            by_head = value.reshape(len(value), -1)
            columns[name], columns[f"{name}_se"] = self.means[name].reshape(-1), _standard_error(by_head)
        if self.roles is not None:
            columns["role"] = self.roles.role.reshape(-1)
        heads = next(iter(self.readings.values.values())).shape[2]
        index = pd.MultiIndex.from_product([self.readings.layers, range(heads)], names=["layer", "head"])
        return pd.DataFrame(columns, index=index)

    @cached_property
    def means(self) -> dict[str, Float[np.ndarray, "layer head"]]:
        """Of every diagnostic, over the texts that have a value."""
        return {
            name: mean_over_texts(value.reshape(len(value), -1)).reshape(value.shape[1:])
            for name, value in self.readings.values.items()
        }

    def correlations(self, against: str = "sink_score") -> pd.DataFrame:
        """Spearman's correlation over heads of every diagnostic with one of them (`correlation.correlations`).

        Raises:
            ValueError: no such diagnostic.
        """
        if against not in self._found:
            self._found[against] = correlations(self.readings.values, against, self.resampling)
        return self._found[against].copy()

    @cached_property
    def _found(self) -> dict[str, pd.DataFrame]:
        return {}

    @cached_property
    def roles(self) -> Roles | None:
        """The role of every head; None where a diagnostic that tells it was not read."""
        if not set(NEEDED) <= set(self.readings.values):
            return None
        means = {name: self.means[name] for name in NEEDED}
        return roles_of(means, self.readings.texts["tokens"].to_numpy(), self.thresholds)

    def against(self) -> Iterator[str]:
        """The diagnostics that a report correlates the others with."""
        return (name for name in AGAINST if name in self.readings.values)


def head_atlas(
    model: Any,
    texts: Sequence[str] | Sequence[Text],
    *,
    analyzers: Sequence[Analyzer] | None = None,
    max_tokens: int = 1024,
    min_tokens: int = 32,
    folder: str | os.PathLike[str] | None = None,
    thresholds: RoleThresholds | None = None,
    resampling: Resampling | None = None,
    rows: str = "error",
    tokenizer: Any = None,
    model_name: str | None = None,
    progress: bool = True,
) -> HeadAtlas:
    """Let a model read texts and say what each of its heads does.

    Texts are read one at a time, each from its start to at most `max_tokens`; a text that is shorter than `min_tokens`
    is left out, and named in the report. Every diagnostic that is one number a head is kept.

    Args:
        model: what `load_model` gives; host="transformers" is the quickest.
        texts: a list of texts.
        analyzers: what to look at; `atlas.default_diagnostics()` by default.
        max_tokens, min_tokens: of one text.
        folder: where readings are kept, as Parquet; the same call goes on in it. By default they are not kept.
        thresholds: of the roles; `RoleThresholds()` by default.
        resampling: of the intervals; `Resampling()` by default.
        rows: policy for models whose rows do not sum to 1, as in `Probe`.
        tokenizer: used instead of `model.tokenizer`.
        model_name: what the record calls the model.
        progress: a bar on standard error, if that is a terminal.

    Returns:
        `HeadAtlas`: `.table`, `.correlations("sink_score")`, `.roles`.

    Raises:
        ValueError: what is wrong with texts, limits or the folder, in one sentence.
        RuntimeError: another run holds the folder.

    Example::

        atlas = attnprobe.head_atlas(attnprobe.load_model(host="transformers"), texts)
        atlas.correlations("sink_score").loc["participation_ratio"]

    Source: [SG] arXiv 2610.06012, the heads of a model under intrinsic and Euclidean diagnostics.
    """
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("texts are strings and the model has no tokenizer: pass tokenizer=.")
    if not 1 <= min_tokens <= max_tokens:
        raise ValueError(
            f"min_tokens={min_tokens}, max_tokens={max_tokens}: use 1 or more, and no more at least than most."
        )
    listed = named_texts(texts)
    chosen = default_diagnostics() if analyzers is None else list(analyzers)
    with tempfile.TemporaryDirectory() as unkept:
        readings = read_heads(
            model,
            listed,
            chosen,
            folder=Path(unkept) if folder is None else Path(folder),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            rows=rows,
            tokenizer=tokenizer,
            model_name=model_name,
            progress=progress,
        )
    return HeadAtlas(readings, thresholds or RoleThresholds(), resampling or Resampling())


def _standard_error(value: np.ndarray) -> np.ndarray:
    """[head] of the mean over the texts that have a value."""
    count = (~np.isnan(value)).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt(np.nansum((value - mean_over_texts(value)) ** 2, axis=0) / (count - 1))
        return np.where(count > 1, spread / np.sqrt(count), np.nan)
