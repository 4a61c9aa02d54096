"""The largest eigenvalues of the Token Difference Operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.analyzers.tdo import TDO
from attnprobe.functional.gram import prefix_key_weights
from attnprobe.functional.top_values import check_top
from attnprobe.rows import Rows

_SOURCE = "Spectral Geometry of Attention (arXiv 2610.06012), eigenvalues of the Token Difference Operator"


class TDOSpectrum(TDO):
    """The k largest eigenvalues of the Token Difference Operator, in descending order.

    Results: `tdo_eigenvalue_1` to `tdo_eigenvalue_<k>`, one number a head each: an eigenvalue belongs to no token, so
    that it has no place on the axis of positions, and a name a number makes a column a number in tables. Other
    measures and scopes are named in the result: `tdo_eigenvalue_1_counting`. Under the intrinsic measure they lie in
    [0, 1] and the first is 1. A pattern of n keys has n eigenvalues: those beyond are 0, and NaN where a generation
    block has no rows at all.

    The Gram matrix is kept as by `TDO` (and shared with it): O(n^2) memory a head. `compute` solves for all eigenvalues
    in float64, O(n^3): per head 1 ms at 200 tokens, 16 ms at 512 and 0.2 s at 1024 to 1500, on one core; an iteration
    for the largest few would not be sure to find an eigenvalue as often as it is there. Over 512 tokens of SmolLM2-135M
    in float32 they were within 4e-6 of the largest one in float64. A trace solves once a step.

    Args:
        k: how many.
        measure: as in `TDO`: "intrinsic" (default), "counting" (the Euclidean spectrum, squared singular values of
            the pattern), "positional", "zipf" or "unembedding".
        scope: "prefix": all tokens so far; "generation": the generation block, rows renormalised; "generation-raw".
        trace: keep the eigenvalues of the prefix at every step; stride: at every stride-th, held between.

    Raises:
        ValueError: k is no whole number of at least 1, or an unknown measure or scope.

    >>> import torch
    >>> from attnprobe import Rows, TDOSpectrum
    >>> spectrum = TDOSpectrum(k=3)
    >>> spectrum.update(Rows.from_pattern(torch.eye(2).reshape(1, 1, 2, 2)))
    >>> {name: value.item() for name, value in spectrum.compute().items()}
    {'tdo_eigenvalue_1': 1.0, 'tdo_eigenvalue_2': 1.0, 'tdo_eigenvalue_3': 0.0}

    Source: [SG] arXiv 2610.06012; its appendix takes k = 16 as features of a detector.
    """

    def __init__(
        self,
        k: int = 16,
        measure: str = "intrinsic",
        *,
        scope: str = "prefix",
        trace: bool = False,
        stride: int = 1,
    ) -> None:
        super().__init__(measure, scope=scope, lambda2=False, trace=trace, stride=stride)
        check_top(k)
        self.k = k

    @property
    def names(self) -> tuple[str, ...]:
        """What the results are called, the largest first."""
        suffix = self.ratio_name.removeprefix("participation_ratio")
        return tuple(f"tdo_eigenvalue_{i}{suffix}" for i in range(1, self.k + 1))

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results, with the measure and scope they belong to."""
        described = {"units": "1", "source": _SOURCE, "measure": self.measure, "scope": self.scope}
        return {
            name: {"long_name": f"eigenvalue {i} of the TDO, descending", **described}
            for i, name in enumerate(self.names, 1)
        }

    def compute(self) -> dict[str, Tensor]:
        mass, count = self._columns.mass, self._columns.count
        if mass.shape[-1] == 0:  # a generation block before the first generated token
            return dict.fromkeys(self.names, mass.new_full(mass.shape[:-1], torch.nan))
        weights = prefix_key_weights(mass.unsqueeze(-2), count[:, None, None], self._measure()).squeeze(-2)
        matrix = self._gram.matrix.dense(weights.expand(mass.shape).sqrt())
        spectrum = torch.stack([_largest(*one, self.k) for one in zip(matrix, mass, strict=True)])
        if self._by_token:  # pi = 1/n is in the intrinsic and positional weights already
            spectrum = spectrum / count[:, None, None]
        spectrum = spectrum.where(count[:, None, None] > 0, torch.nan)
        return dict(zip(self.names, spectrum.unbind(-1), strict=True))

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        values = Analyzer.trace_rows(self, rows)
        return {name: value.where(rows.valid.unsqueeze(1), torch.nan) for name, value in values.items()}

    @classmethod
    def trace_together(cls, analyzers: Sequence[TDO], rows: Rows) -> dict[str, Tensor]:
        """The traces of several spectra, one after the other: prefixes have no spectrum in common."""
        return {name: value for analyzer in analyzers for name, value in analyzer.trace_rows(rows).items()}


def _largest(matrix: Float[Tensor, "head key key"], mass: Float[Tensor, "head key"], k: int) -> Float[Tensor, "head k"]:
    """The k largest eigenvalues of one sequence; the keys that padding of the batch has added are left out."""
    n = int((mass > 0).any(0).nonzero().max()) + 1 if bool((mass > 0).any()) else 1
    matrix = matrix[:, :n, :n]
    if matrix.device.type == "mps":  # which knows neither float64 nor eigenvalues
        matrix = matrix.cpu()
    descending = torch.linalg.eigvalsh(matrix.double()).flip(-1).clamp_min(0.0)[:, :k]
    return torch.nn.functional.pad(descending, (0, k - descending.shape[-1])).to(mass)
