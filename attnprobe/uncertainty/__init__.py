"""Uncertainty of answers: scores, the routing signals behind them, and `score`, which puts the pieces together."""

from attnprobe.uncertainty.attention_score import AttentionScore
from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.method import Assessment, Method
from attnprobe.uncertainty.nli import NLI, EntailmentModel
from attnprobe.uncertainty.rauq import RAUQ
from attnprobe.uncertainty.recurrent import Recurrent
from attnprobe.uncertainty.registry import method_named, method_names
from attnprobe.uncertainty.sampled import SampledAssessment, SampledMethod, Samples
from attnprobe.uncertainty.sampling import Sample, SamplingSettings
from attnprobe.uncertainty.sauq import SAUQ
from attnprobe.uncertainty.score import Score, score
from attnprobe.uncertainty.screened import ScreenedRecurrent
from attnprobe.uncertainty.semantic import LUQ, SemanticEntropy
from attnprobe.uncertainty.spectral_rauq import LapEigValRAUQ, LogDetRAUQ
from attnprobe.uncertainty.token_scores import (
    MaximumSequenceProbability,
    MaximumTokenEntropy,
    MeanTokenEntropy,
    Perplexity,
)

__all__ = [
    "LUQ",
    "NLI",
    "RAUQ",
    "SAUQ",
    "Assessment",
    "AttentionScore",
    "EntailmentModel",
    "Evidence",
    "LapEigValRAUQ",
    "LogDetRAUQ",
    "MaximumSequenceProbability",
    "MaximumTokenEntropy",
    "MeanTokenEntropy",
    "Method",
    "Perplexity",
    "Recurrent",
    "Sample",
    "SampledAssessment",
    "SampledMethod",
    "Samples",
    "SamplingSettings",
    "Score",
    "ScreenedRecurrent",
    "SemanticEntropy",
    "method_named",
    "method_names",
    "score",
]
