"""What a study found, as tables to read and files to go on with."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from attnprobe.bench.tables import Section
from attnprobe.polarity.reading import TRUNCATION
from attnprobe.polarity.reversal import Reversal
from attnprobe.polarity.study import Polarity

KIND_NAMES = {"plain": "all pairs", "length": "pairs of one length bin", "question": "answers of one question"}
_STRONGEST = 5


@dataclass(frozen=True, eq=False)
class PolarityStudy:
    """A polarity study of one data set or two.

    Attributes:
        found: what was found on each data set.
        reversal: the two beside each other; None for one.
        settings: how it was made: model, max_tokens, rows and so on, as JSON knows it.
        notices: what a user should know about the run, a sentence each.
    """

    found: tuple[Polarity, ...]
    reversal: Reversal | None
    settings: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @property
    def table(self) -> pd.DataFrame:
        """A row a data set, kind of AUROC and feature (`Polarity.table`)."""
        return pd.concat([found.table for found in self.found], ignore_index=True)

    def summary(self) -> dict[str, Any]:
        """The study without its heads, as JSON knows it: settings, data sets, responses, counts, reversal."""
        table = self.table
        said: dict[str, Any] = {
            "settings": self.settings,
            "truncation": TRUNCATION,
            "data": [found.summary for found in self.found],
            "responses": table[table["level"] == "response"].drop(columns=["layer", "head"]).to_dict("records"),
            "significant": _counts(table).to_dict("records"),
            "notices": list(self.notices),
        }
        if self.reversal is not None:
            both = self.reversal.table
            said["reversal"] = {
                "responses": both[both["level"] == "response"].drop(columns=["layer", "head"]).to_dict("records"),
                "reversed": _reversed_counts(both).to_dict("records"),
                "profiles": self.reversal.profiles.to_dict("records"),
            }
        return plain_json(said)

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write polarity.csv, summary.json and, for two data sets, reversal.csv and profiles.csv.

        Returns:
            The files.

        Raises:
            OSError: one cannot be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        frames = {"polarity.csv": self.table}
        if self.reversal is not None:
            frames |= {"reversal.csv": self.reversal.table, "profiles.csv": self.reversal.profiles}
        for name, frame in frames.items():
            frame.to_csv(folder / name, index=False, lineterminator="\n")
        text = json.dumps(self.summary(), indent=1, allow_nan=False) + "\n"
        (folder / "summary.json").write_text(text, encoding="utf-8")
        return [*(folder / name for name in frames), folder / "summary.json"]

    def sections(self) -> Iterator[Section]:
        """The tables to print."""
        yield self._data()
        for found in self.found:
            yield _responses(found)
            yield _heads(found)
        if self.reversal is not None:
            yield from _reversal(self.reversal)

    def _data(self) -> Section:
        rows = {}
        for found in self.found:
            said = found.summary
            tokens, below = said["median_answer_tokens"], said["heads_below_floor"]
            rows[said["data"]] = {
                "answers": str(said["answers"]),
                "questions": str(said["questions"]),
                "hallucinated": str(said["hallucinated"]),
                "prompts cut": str(said["truncated"]),
                "left out": str(said["left_out"]),
                "tokens of right answers": f"{tokens['right']:g}",
                "of hallucinated ones": f"{tokens['hallucinated']:g}",
                "heads below 1/5, right": f"{below['right']:.3f}",
                "heads below 1/5, hallucinated": f"{below['hallucinated']:.3f}",
            }
        note = f"Tokens are medians; {TRUNCATION}."
        return Section("Data", _frame(rows, "data"), (note,))


def plain_json(value: Any) -> Any:
    """A value as strict JSON knows it: numbers of numpy become Python's, NaN None.

    >>> plain_json({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {str(name): plain_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _counts(table: pd.DataFrame) -> pd.DataFrame:
    """Significant features by data, kind, level and quantity: how many there are, and of either sign."""
    keys = ["data", "kind", "level", "quantity"]
    signs = table.assign(
        up=table["significant"] & (table["polarity"] > 0), down=table["significant"] & (table["polarity"] < 0)
    )
    counted = signs.groupby(keys, sort=False).agg(features=("up", "size"), up=("up", "sum"), down=("down", "sum"))
    return counted.reset_index()


def _reversed_counts(table: pd.DataFrame) -> pd.DataFrame:
    counted = table.groupby(["kind", "level"], sort=False).agg(
        features=("reversed", "size"), opposite=("opposite", "sum"), reversed=("reversed", "sum")
    )
    return counted.reset_index()


def _responses(found: Polarity) -> Section:
    settings, table = found.settings, found.table[found.table["level"] == "response"]
    rows: dict[str, dict[str, str]] = {}
    for row in table.to_dict("records"):
        cell = _auroc(row["auroc"], row["low"], row["high"])
        rows.setdefault(row["quantity"], {}).update(
            {KIND_NAMES[row["kind"]]: cell, f"p, {row['kind']}": _p(row["p_adjusted"])}
        )
    for kind, comparison in found.comparisons.items():
        rows.setdefault("length alone", {})[KIND_NAMES[kind]] = _number(comparison.length_auroc)
    pairs = "; ".join(f"{KIND_NAMES[kind]}: {comparison.pairs}" for kind, comparison in found.comparisons.items())
    return Section(
        f"{found.features.label}: means over all heads, AUROC with {100 * settings.level:g} % interval",
        _frame(rows, "feature").fillna(""),
        (
            "Above 1/2: higher on hallucinated answers. p: permutation test, Holm over the features of the table.",
            f"Pairs of answers compared: {pairs}.",
        ),
    )


def _heads(found: Polarity) -> Section:
    counted = _counts(found.table[found.table["level"] == "head"])
    rows: dict[str, dict[str, str]] = {}
    for row in counted.to_dict("records"):
        rows.setdefault(row["quantity"], {"heads": str(row["features"])})[KIND_NAMES[row["kind"]]] = (
            f"{row['up']} + {row['down']} -"
        )
    alpha = 100 * found.settings.alpha
    return Section(
        f"{found.features.label}: heads with a significant polarity",
        _frame(rows, "quantity"),
        (
            f"False discovery rate {alpha:g} % over all heads and quantities (Benjamini and Hochberg).",
            *_strongest(found),
        ),
    )


def _strongest(found: Polarity) -> Iterator[str]:
    for kind in found.comparisons:
        table = found.table[(found.table["kind"] == kind) & (found.table["level"] == "head")].dropna(subset="auroc")
        first = table.iloc[(table["auroc"] - 0.5).abs().argsort(kind="stable")[::-1][:_STRONGEST]]
        named = ", ".join(
            f"{row['quantity']} of layer {row['layer']} head {row['head']} {_number(row['auroc'])}"
            for row in first.to_dict("records")
        )
        if named:
            yield f"Farthest from 1/2 over {KIND_NAMES[kind]}: {named}."


def _reversal(reversal: Reversal) -> Iterator[Section]:
    labels = [found.features.label for found in (reversal.first, reversal.second)]
    table, alpha = reversal.table, 100 * reversal.first.settings.alpha
    for kind in reversal.kinds:
        own = table[(table["kind"] == kind) & (table["level"] == "response")]
        rows = {
            row["quantity"]: {
                labels[0]: _number(row["auroc_1"]),
                labels[1] + ("" if labels[0] != labels[1] else " (2)"): _number(row["auroc_2"]),
                "sides": "opposite" if row["opposite"] else "same",
                "p of reversal": _p(row["p_adjusted"]),
            }
            for row in own.to_dict("records")
        }
        counts = _reversed_counts(table[table["kind"] == kind])
        said = [
            f"{row['level']}s: {row['opposite']} of {row['features']} opposite, {row['reversed']} significantly"
            for row in counts.to_dict("records")
        ]
        yield Section(
            f"Reversal between {labels[0]} and {labels[1]}, {KIND_NAMES[kind]}: means over all heads",
            _frame(rows, "feature"),
            (
                "p: both sides significant and opposite; Holm over the features of the table.",
                f"{'; '.join(said)} (corrected, {alpha:g} %).",
            ),
        )
    rows = {
        f"{row['quantity']}, {row['kind']}": {
            "heads": str(row["heads"]),
            "cosine": _number(row["cosine"]),
            "p of reversal": _p(row["p_reversal_adjusted"]),
            "p of agreement": _p(row["p_agreement"]),
            "opposite, both significant": str(row["opposite"]),
            "p ": _p(row["p_opposite"]),
            "same, both significant": str(row["same"]),
        }
        for row in reversal.profiles.to_dict("records")
    }
    yield Section(
        "Reversal over heads: cosine between the profiles AUROC - 1/2",
        _frame(rows, "quantity, pairs"),
        ("p of reversal: Holm over quantities. Labels of one data set permuted, the larger p-value of the two.",),
    )


def _frame(rows: dict[str, dict[str, str]], index: str) -> pd.DataFrame:
    frame = pd.DataFrame.from_dict(rows, orient="index")
    frame.index.name = index
    return frame


def _auroc(value: float, low: float, high: float) -> str:
    return "no pairs" if math.isnan(value) else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _p(value: float) -> str:
    return "-" if math.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"
