"""Tables of an atlas."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnprobe.atlas.atlas import HeadAtlas
from attnprobe.atlas.roles import ROLES, RoleThresholds
from attnprobe.bench.tables import Section

if TYPE_CHECKING:
    import pandas as pd


def sections(atlas: HeadAtlas) -> Iterator[Section]:
    """What an atlas says, as tables: diagnostics with their correlations, and roles."""
    yield _diagnostics(atlas)
    if atlas.roles is not None:
        yield _roles(atlas)


def summary(atlas: HeadAtlas) -> dict[str, Any]:
    """An atlas as JSON knows it: texts, correlations, counts of roles; NaN is null."""
    readings = atlas.readings
    roles = {} if atlas.roles is None else {name: int((atlas.roles.role == name).sum()) for name in ROLES}
    return {
        "texts": len(readings.texts),
        "tokens": int(readings.texts["tokens"].sum()),
        "texts_cut": readings.cut,
        "texts_left_out": readings.failed,
        "layers": list(readings.layers),
        "correlations": {
            against: json.loads(atlas.correlations(against).to_json(orient="index", double_precision=6))
            for against in atlas.against()
        },
        "roles": roles,
    }


def write(atlas: HeadAtlas, folder: str | os.PathLike[str]) -> list[Path]:
    """Write `heads.csv`, a row a head, `correlations_with_....csv` and `summary.json`.

    Raises:
        OSError: they cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "heads.csv", folder / "summary.json"]
    atlas.table.to_csv(written[0])
    written[1].write_text(json.dumps(summary(atlas), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for against in atlas.against():
        written.append(folder / f"correlations_with_{against}.csv")
        atlas.correlations(against).to_csv(written[-1])
    return written


def _diagnostics(atlas: HeadAtlas) -> Section:
    import pandas as pd

    readings, table = atlas.readings, atlas.table
    rows: dict[str, dict[str, str]] = {}
    found = {against: atlas.correlations(against) for against in atlas.against()}
    for name in readings.values:
        over_heads = table[name].to_numpy()
        quartiles = np.nanquantile(over_heads, [0.25, 0.5, 0.75]) if not np.isnan(over_heads).all() else [np.nan] * 3
        rows[name] = {"median [quartiles]": "{1:.3g} [{0:.3g}, {2:.3g}]".format(*quartiles)}
        for against, correlated in found.items():
            rows[name][f"with {against}"] = "-" if name == against else _correlation(correlated.loc[name])
    length = readings.texts["tokens"]
    level = f"{100 * atlas.resampling.level:g} %"
    notes = [
        f"{len(readings.texts)} texts of {length.min()} to {length.max()} tokens, {len(table)} heads; median and "
        "quartiles over heads of means over texts.",
        f"With: Spearman's correlation over heads, {level} interval over heads / over texts "
        f"({atlas.resampling.resamples} resamples, seed {atlas.resampling.seed}).",
    ]
    if readings.cut:
        notes.append(f"{readings.cut} texts were longer and read from their start only.")
    for name, why in list(readings.failed.items())[:3]:
        notes.append(f"{name} was left out: {why}.")
    if len(readings.failed) > 3:
        notes.append(f"{len(readings.failed)} texts in all were left out.")
    return Section("Heads", _frame(pd.DataFrame.from_dict(rows, orient="index"), "diagnostic"), notes)


def _roles(atlas: HeadAtlas) -> Section:
    import pandas as pd

    assert atlas.roles is not None
    told = _told_by(atlas.thresholds)
    rows = {}
    for name in ROLES:
        best = atlas.roles.representative.get(name)
        rows[name] = {
            "heads": str(int((atlas.roles.role == name).sum())),
            "told by": told[name],
            "clearest (layer.head)": "-" if best is None else f"{atlas.readings.layers[best[0]]}.{best[1]}",
        }
    return Section("Roles", _frame(pd.DataFrame.from_dict(rows, orient="index"), "role"))


def _told_by(thresholds: RoleThresholds) -> dict[str, str]:
    sink = f"sink score >= {thresholds.sink:g}"
    return {
        "copying": f"self-attention >= {thresholds.copying:g}",
        "shifting": f"previous token >= {thresholds.shifting:g}",
        "sinking": f"{sink}, participation ratio < {thresholds.routing:g}",
        "sink-biased": f"{sink}, participation ratio >= {thresholds.routing:g}",
        "diffuse": f"row entropy >= {thresholds.diffuse:g} of uniform",
        "mixed": "none of these",
    }


def _correlation(row: Any) -> str:
    if np.isnan(row["spearman"]):
        return "undefined"
    over_heads = f"{row['spearman']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
    return (
        over_heads
        if np.isnan(row["texts_low"])
        else f"{over_heads} / [{row['texts_low']:.2f}, {row['texts_high']:.2f}]"
    )


def _frame(frame: pd.DataFrame, index: str) -> pd.DataFrame:
    return frame.rename_axis(index)
