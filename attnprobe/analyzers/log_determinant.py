"""The determinant of a causal pattern: the product of what tokens give to themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.log_determinant import check_epsilon, log_weights
from attnprobe.rows import Rows

_SOURCE = "LapEigvals (arXiv 2502.17598), attention log-determinant; LLM-Check (NeurIPS 2024), attention score"


class LogDeterminant(Analyzer):
    """log det A = sum_i log A_ii of a causal pattern, and its mean over tokens, nats. O(1) memory a head.

    Results: `log_determinant` and `log_determinant_mean`, with a positive epsilon in their names; float64 (but on
    devices without), so that the sum over a long text is as exact as its weights. A softmax in float32 knows a weight
    to about 1e-6 of itself, which adds as much to its logarithm. A weight that has underflowed to 0 (below 1e-45 in
    float32, below 6e-8 in a float16 pattern) makes both -inf for good, unless epsilon is positive. Under the policy
    "sink" weights count as they are, the sink taking its share.

    Args:
        epsilon: added to every weight.
        trace: keep the results at every step; stride: at every stride-th, held between.

    Raises:
        ValueError: a negative epsilon, or a site that is not causal self-attention.

    >>> import torch
    >>> from attnprobe import LogDeterminant, Rows
    >>> analyzer = LogDeterminant()
    >>> analyzer.update(Rows.from_pattern(torch.tensor([[1.0, 0.0], [0.5, 0.5]]).reshape(1, 1, 2, 2)))
    >>> {name: round(value.item(), 4) for name, value in analyzer.compute().items()}
    {'log_determinant': -0.6931, 'log_determinant_mean': -0.3466}

    Source: [LE] arXiv 2502.17598; LLM-Check, NeurIPS 2024.
    """

    def __init__(self, epsilon: float = 0.0, *, trace: bool = False, stride: int = 1) -> None:
        super().__init__(trace=trace, stride=stride)
        check_epsilon(epsilon)
        self.epsilon = epsilon
        suffix = f"_epsilon{epsilon:g}" if epsilon else ""
        self.sum_name = f"log_determinant{suffix}"
        self.mean_name = f"log_determinant_mean{suffix}"

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results."""
        described = {"units": "nats", "source": _SOURCE, "epsilon": f"{self.epsilon:g}"}
        return {
            self.sum_name: {"long_name": "log-determinant of the pattern", **described},
            self.mean_name: {"long_name": "mean logarithm of what a token gives to itself", **described},
        }

    def update(self, rows: Rows) -> None:
        logs = self._logs(rows)
        self.accumulate(logs=logs.sum(-1), rows=rows.count[:, None])

    def compute(self) -> dict[str, Tensor]:
        return self._named(self.total["logs"], self.total["rows"])

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        """The sum and the mean of the prefix; what a part of the text adds is the difference of two sums."""
        logs = self._logs(rows).cumsum(-1)
        if "logs" in self.total:
            logs = logs + self.total["logs"].unsqueeze(-1)
        values = self._named(logs, (rows.position + 1).unsqueeze(1))
        return {name: torch.where(rows.valid.unsqueeze(1), value, torch.nan) for name, value in values.items()}

    def merge(self, other: Analyzer) -> None:
        """Add what another analyzer with the same epsilon saw: other rows of the same sequences.

        Raises:
            TypeError: the other is of another class.
            ValueError: its epsilon differs.
        """
        if isinstance(other, LogDeterminant) and other.epsilon != self.epsilon:
            raise ValueError(f"cannot merge {other!r} into {self!r}: their settings differ.")
        super().merge(other)

    def _named(self, logs: Tensor, rows: Tensor) -> dict[str, Tensor]:
        return {self.sum_name: logs, self.mean_name: logs / rows}

    def _logs(self, rows: Rows) -> Tensor:
        if not (rows.causal and rows.self_attention):
            raise ValueError("a determinant is the product of the diagonal in causal self-attention only.")
        diagonal = rows.diagonal()
        return log_weights(diagonal, rows.valid.unsqueeze(1).expand_as(diagonal), self.epsilon)
