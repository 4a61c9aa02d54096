"""How good an uncertainty is: rejection, areas under curves, length, intervals and comparisons.

Functions of one number an answer: lists, numpy arrays, pandas Series and torch tensors, taken by position. No model
and no torch is needed. A metric that has no value on given answers is NaN with scikit-learn's
`UndefinedMetricWarning`; input that cannot be right is a ValueError.

>>> from attnprobe import metrics
>>> metrics.prediction_rejection_ratio([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 0])
1.0
"""

from attnprobe.metrics.comparison import PairedTest, compare, holm_correction, paired_test
from attnprobe.metrics.discrimination import auroc, average_precision
from attnprobe.metrics.intervals import Interval, bootstrap
from attnprobe.metrics.length import (
    LengthControlledAUROC,
    LengthCorrelation,
    length_controlled_auroc,
    length_correlation,
)
from attnprobe.metrics.rejection import RejectionCurve, prediction_rejection_ratio, rejection_curve

__all__ = [
    "Interval",
    "LengthControlledAUROC",
    "LengthCorrelation",
    "PairedTest",
    "RejectionCurve",
    "auroc",
    "average_precision",
    "bootstrap",
    "compare",
    "holm_correction",
    "length_controlled_auroc",
    "length_correlation",
    "paired_test",
    "prediction_rejection_ratio",
    "rejection_curve",
]
