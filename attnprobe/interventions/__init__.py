"""Changing what heads pass on, to see what depends on it."""

from attnprobe.interventions.ablation import ablate
from attnprobe.interventions.means import head_means

__all__ = ["ablate", "head_means"]
