"""How the cost of each analyzer grows with the length of the text.

Each analyzer alone, prompts of several lengths, new tokens fixed. The slope of a line through the logarithms is the
exponent: 1 grows with n, 2 with n^2. What costs the same at every length flattens it at short ones, so it is also
fitted to the three longest texts alone. It is fitted only where a figure is above noise: seconds where at least three
quarters of the rounds were above the bare host of the same round; peak memory where it is above bare by more than the
bare host differs from itself from process to process. The state of the analyzers has no noise.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import linregress

from benchmarks.measure import Figures

FIGURES = ("seconds", "peak_mb", "state_bytes")
PROMPTS = (128, 256, 512, 1024, 2048)
# Two processes that run the same work differ by a megabyte or two.
NOISE_MB = 2.0


@dataclass
class Growth:
    """The figures of one analyzer over n = tokens in all; None where there is none above noise."""

    host: str
    variant: str
    n: list[int] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)
    peak_mb: list[float | None] = field(default_factory=list)
    state_bytes: list[float | None] = field(default_factory=list)

    def slopes(self, last: int = 0) -> dict[str, float | None]:
        """The exponent of n in each figure, over all of n or over the `last` ones alone."""
        return {name: slope(self.n[-last:], getattr(self, name)[-last:]) for name in FIGURES}

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "slopes": self.slopes(), "slopes_at_the_end": self.slopes(last=3)}


def growth(points: Sequence[Sequence[Figures]], analyzers: Sequence[str]) -> list[Growth]:
    """The growth of each analyzer over points that differ in the length of the prompt alone."""
    grown = []
    for name in analyzers:
        rows = [figure for point in points for figure in point if figure.variant == name and figure.status == "ok"]
        if not rows:
            continue
        one = Growth(rows[0].workload.host, name)
        for row in rows:
            one.n.append(row.workload.prompt + row.workload.new_tokens)
            one.seconds.append(_seconds_above_noise(row))
            one.peak_mb.append(_peak_above_noise(row))
            one.state_bytes.append(None if row.state_bytes is None else float(row.state_bytes))
        grown.append(one)
    return grown


def slope(n: Sequence[float], figure: Sequence[float | None]) -> float | None:
    """Least-squares slope of log figure over log n, where there is a figure; None with fewer than three."""
    pairs = [(x, y) for x, y in zip(n, figure, strict=True) if y is not None and y > 0]
    if len(pairs) < 3:
        return None
    logs = np.log(np.array(pairs, dtype=float))
    fitted = float(linregress(logs[:, 0], logs[:, 1]).slope)
    return None if math.isnan(fitted) else fitted


def _seconds_above_noise(figures: Figures) -> float | None:
    above = figures.above
    if not above or sum(seconds > 0 for seconds in above) < 0.75 * len(above):
        return None
    return statistics.median(above)


def _peak_above_noise(figures: Figures) -> float | None:
    above = figures.peak_mb_above
    return above if above is not None and above > NOISE_MB else None
