"""Scores that read token probabilities alone."""

from __future__ import annotations

from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.method import Assessment, Method


class Perplexity(Method):
    """Mean of -log p_t over the generated tokens, nats (the logarithm of the perplexity)."""

    name = "Perplexity"

    def assess(self, evidence: Evidence) -> Assessment:
        return Assessment(float(-evidence.log_probability.mean()))


class MaximumSequenceProbability(Method):
    """-sum_t log p_t over the generated tokens, nats: minus the log-probability of the answer.

    Source: LM-Polygraph, the estimator of that name. It grows with the answer; `Perplexity` is its mean.
    """

    name = "MaximumSequenceProbability"

    def assess(self, evidence: Evidence) -> Assessment:
        return Assessment(float(-evidence.log_probability.sum()) + 0.0)  # no minus zero


class MeanTokenEntropy(Method):
    """Mean entropy of the full next-token distribution over the generated tokens, nats."""

    name = "MeanTokenEntropy"

    def assess(self, evidence: Evidence) -> Assessment:
        return Assessment(float(evidence.entropy.mean()))


class MaximumTokenEntropy(Method):
    """Largest entropy of the full next-token distribution over the generated tokens, nats: the least certain token."""

    name = "MaximumTokenEntropy"

    def assess(self, evidence: Evidence) -> Assessment:
        return Assessment(float(evidence.entropy.max()))
