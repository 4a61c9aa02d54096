"""Published figures, to stand beside one's own: another model's, so no target.

Source: [SG] "Spectral Geometry of Attention: From Information Routing to Uncertainty" (arXiv 2610.06012).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

MODEL = "LLaMA-3.1-8B"
SOURCE = "[SG] arXiv 2610.06012"
#: The fraction of answers that the published ratios reject at most.
MAX_REJECTION = 0.5

#: The qualities behind them.
QUALITIES = ("alignscore", "alignscore_source", "exact_match")

QA = ("TriviaQA", "TruthfulQA", "MMLU", "CoQA")
SUMMARIES = ("SAMSum", "XSum")
QA_MEAN, SUMMARY_MEAN = "QA mean", "summ. mean"

_COLUMNS = (*QA, QA_MEAN, *SUMMARIES, SUMMARY_MEAN)
# The names are those of `attnprobe.score`; SemanticEntropy and LUQ sampled 10 answers. Means are as printed, that of
# LogDetRAUQ too, whose four tasks have the mean 0.3284.
_METHODS: dict[str, tuple[float, ...]] = {
    "AttentionScore": (0.0796, -0.0505, 0.2078, 0.0933, 0.0826, -0.3727, -0.9983, -0.6855),
    "Perplexity": (0.1088, 0.2863, 0.5158, 0.2737, 0.2962, 0.5071, 0.4053, 0.4562),
    "MeanTokenEntropy": (0.5661, 0.4199, 0.2437, 0.2568, 0.3716, 0.4999, 0.3928, 0.4464),
    "SemanticEntropy": (0.2005, 0.2113, 0.4701, 0.3662, 0.3120, 0.2525, -0.1886, 0.0320),
    "LUQ": (0.5878, 0.1820, 0.4392, 0.3588, 0.3920, 0.2900, 0.3585, 0.3243),
    "RAUQ": (0.2631, 0.3369, 0.5596, 0.3110, 0.3677, 0.5269, 0.3008, 0.4139),
    "LapEigValRAUQ": (0.1190, 0.3296, 0.5578, 0.3064, 0.3282, 0.5285, 0.2907, 0.4096),
    "LogDetRAUQ": (0.1140, 0.3313, 0.5596, 0.3087, 0.3280, 0.5288, 0.3048, 0.4168),
    "SAUQ-generation": (0.5013, 0.3056, 0.5375, 0.3110, 0.4139, 0.4948, 0.2578, 0.3763),
    "SAUQ": (0.2914, 0.3767, 0.5588, 0.3055, 0.3831, 0.5924, 0.4214, 0.5069),
}
# SAUQ under five measures. The names are the labels of the example configuration of this comparison.
_MEASURES: dict[str, tuple[float, float]] = {
    "SAUQ-intrinsic": (0.3831, 0.5069),
    "SAUQ-positional": (0.4027, 0.4771),
    "SAUQ-counting": (0.3660, 0.4204),
    "SAUQ-zipf": (0.3718, 0.4223),
    "SAUQ-unembedding": (0.3755, 0.4202),
}


def published_methods() -> pd.DataFrame:
    """Prediction rejection ratios of ten methods on six tasks, with the means of the two kinds of tasks.

    Returns:
        A DataFrame, methods by tasks; its `attrs` name the model and the source.

    >>> float(published_methods().loc["SAUQ", "QA mean"])
    0.3831
    """
    import pandas as pd

    return _sourced(pd.DataFrame.from_dict(_METHODS, orient="index", columns=list(_COLUMNS)))


def published_measures() -> pd.DataFrame:
    """Mean prediction rejection ratios of SAUQ under five measures.

    Returns:
        A DataFrame, measures by the two means; its `attrs` name the model and the source.

    >>> float(published_measures().loc["SAUQ-positional", "summ. mean"])
    0.4771
    """
    import pandas as pd

    return _sourced(pd.DataFrame.from_dict(_MEASURES, orient="index", columns=[QA_MEAN, SUMMARY_MEAN]))


def published(method: str, column: str) -> float:
    """One published figure; NaN where there is none.

    >>> published("RAUQ", "XSum"), published("RAUQ", "another task")
    (0.3008, nan)
    """
    if method in _METHODS and column in _COLUMNS:
        return _METHODS[method][_COLUMNS.index(column)]
    if method in _MEASURES and column in (QA_MEAN, SUMMARY_MEAN):
        return _MEASURES[method][0 if column == QA_MEAN else 1]
    return float("nan")


def _sourced(table: pd.DataFrame) -> pd.DataFrame:
    table.index.name = "method"
    table.attrs.update(model=MODEL, source=SOURCE, metric="prediction rejection ratio", max_rejection=MAX_REJECTION)
    return table
