"""Supervised detection of wrong answers, from what attention heads do while a model reads them.

`features_of` lets a model read prompts with given answers; `evaluate` splits, fits and tests; `Detector` is fitted,
saved, loaded, and applied to new text in one call.

>>> from attnprobe import detection
>>> detection.FeatureSettings(["tdo", "transport"], k=16).kinds
('tdo', 'transport')
"""

from attnprobe.detection.detector import LABEL, Detector
from attnprobe.detection.evaluation import Evaluation, evaluate, grouped_auroc, out_of_fold
from attnprobe.detection.feature_settings import KINDS, Column, FeatureSettings
from attnprobe.detection.features import Features, features_of
from attnprobe.detection.fingerprint import Fingerprint

__all__ = [
    "KINDS",
    "LABEL",
    "Column",
    "Detector",
    "Evaluation",
    "FeatureSettings",
    "Features",
    "Fingerprint",
    "evaluate",
    "features_of",
    "grouped_auroc",
    "out_of_fold",
]
