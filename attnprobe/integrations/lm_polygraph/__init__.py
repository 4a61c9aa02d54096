"""LM-Polygraph with the scores of this library, and this library with the estimators of LM-Polygraph.

`AttnProbeEstimator` goes wherever an LM-Polygraph estimator does, and `PolygraphMethod` wherever a method of `score`
does. This module is also what an LM-Polygraph configuration names: it has `load_estimator` and `load_stat_calculator`.

Needs `pip install "attnprobe[lm-polygraph]"`.
"""

from __future__ import annotations

import importlib


def _need_lm_polygraph() -> None:
    """
    Raises:
        ImportError: LM-Polygraph, or something that it wants, is not installed; the sentence says how to get it.
    """
    try:
        importlib.import_module("lm_polygraph.estimators")
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ImportError(
            f'attnprobe.integrations.lm_polygraph needs the package {package!r}: pip install "attnprobe[lm-polygraph]"'
        ) from error


_need_lm_polygraph()

from attnprobe.integrations.lm_polygraph.builders import load_estimator, load_stat_calculator  # noqa: E402
from attnprobe.integrations.lm_polygraph.calculator import AttnProbeCalculator  # noqa: E402
from attnprobe.integrations.lm_polygraph.estimator import AttnProbeEstimator  # noqa: E402
from attnprobe.integrations.lm_polygraph.manager import (  # noqa: E402
    estimate_uncertainty,
    estimators,
    stat_calculators,
)
from attnprobe.integrations.lm_polygraph.sampled import PolygraphMethod  # noqa: E402

__all__ = [
    "AttnProbeCalculator",
    "AttnProbeEstimator",
    "PolygraphMethod",
    "estimate_uncertainty",
    "estimators",
    "load_estimator",
    "load_stat_calculator",
    "stat_calculators",
]
