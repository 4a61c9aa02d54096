"""Spectral entropy of a head's output and the bounds that routing sets on it."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.entropy import entropy_from_moments
from attnprobe.rows import Rows
from attnprobe.state import OutputMoments

_SOURCE = "Spectral Geometry of Attention (arXiv 2610.06012), spectral entropy bound"


class SpectralEntropyBound(Analyzer):
    """H(Z) of the outputs Z = A V and the bounds alpha H(Z_c) <= H(Z) <= h_2(alpha) + alpha H(Z_c).

    Results in nats: `entropy`, `centered_entropy`, `entropy_lower`, `entropy_upper`. O(d^2) memory a head.

    Args:
        trace: keep the results at every step (a d x d eigenproblem a head and step); stride: at every
            stride-th, held between.

    Needs the hook `hook_z`.

    >>> import torch
    >>> from attnprobe import Rows, SpectralEntropyBound
    >>> bound = SpectralEntropyBound()
    >>> z = torch.eye(2).reshape(1, 2, 1, 2)
    >>> bound.update(Rows.from_pattern(torch.eye(2).reshape(1, 1, 2, 2), z=z))
    >>> round(bound.compute()["entropy"].item(), 4)
    0.6931

    Source: [SG] arXiv 2610.06012.
    """

    needs = ("pattern", "z")
    variables: ClassVar = {
        "entropy": {
            "long_name": "spectral entropy H(Z) of the head output",
            "units": "nats",
            "source": _SOURCE,
        },
        "centered_entropy": {"long_name": "spectral entropy of the centred output", "units": "nats"},
        "entropy_lower": {"long_name": "alpha H(Z_c)", "units": "nats", "source": _SOURCE},
        "entropy_upper": {"long_name": "h2(alpha) + alpha H(Z_c)", "units": "nats", "source": _SOURCE},
    }

    def update(self, rows: Rows) -> None:
        self.use(OutputMoments).update(rows)

    def compute(self) -> dict[str, Tensor]:
        outputs = self.use(OutputMoments)
        return _named(outputs.mean, outputs.covariance)

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        count, mean, scatter = self.use(OutputMoments).prefixes(rows)
        covariance = scatter / count.clamp_min(1)[:, :, None, None, None]
        return {name: value.transpose(1, 2) for name, value in _named(mean, covariance).items()}


def _named(mean: Tensor, covariance: Tensor) -> dict[str, Tensor]:
    bound = entropy_from_moments(mean, covariance)
    return {
        "entropy": bound.entropy,
        "centered_entropy": bound.centered_entropy,
        "entropy_lower": bound.lower,
        "entropy_upper": bound.upper,
    }
