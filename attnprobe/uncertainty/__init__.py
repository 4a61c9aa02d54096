"""Uncertainty of answers: scores, the routing signals behind them, and `score`, which puts the pieces together."""

from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.method import Assessment, Method
from attnprobe.uncertainty.recurrent import RAUQ, SAUQ, Recurrent
from attnprobe.uncertainty.registry import method_named, method_names
from attnprobe.uncertainty.score import Score, score
from attnprobe.uncertainty.token_scores import MeanTokenEntropy, Perplexity

__all__ = [
    "RAUQ",
    "SAUQ",
    "Assessment",
    "Evidence",
    "MeanTokenEntropy",
    "Method",
    "Perplexity",
    "Recurrent",
    "Score",
    "method_named",
    "method_names",
    "score",
]
