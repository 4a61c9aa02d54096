"""Scores that read token probabilities alone."""

from __future__ import annotations

from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.method import Assessment, Method


class Perplexity(Method):
    """Mean of -log p_t over the generated tokens, nats (the logarithm of the perplexity)."""

    name = "Perplexity"

    def assess(self, evidence: Evidence) -> Assessment:
        return Assessment(float(-evidence.log_probability.mean()))


class MeanTokenEntropy(Method):
    """Mean entropy of the full next-token distribution over the generated tokens, nats."""

    name = "MeanTokenEntropy"

    def assess(self, evidence: Evidence) -> Assessment:
        return Assessment(float(evidence.entropy.mean()))
