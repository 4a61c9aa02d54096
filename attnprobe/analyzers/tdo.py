"""The Token Difference Operator of a head: participation ratio and second eigenvalue."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.gram import prefix_key_weights, prefix_ratio_of_rows
from attnprobe.functional.measures import Measure, unembedding_measure, zipf_measure
from attnprobe.functional.patterns import safe_divide
from attnprobe.rows import Rows
from attnprobe.state import Columns, Gram, Tokens

MEASURES = ("intrinsic", "counting", "positional", "zipf", "unembedding")
SCOPES = ("prefix", "generation", "generation-raw")
_SOURCE = "Spectral Geometry of Attention (arXiv 2610.06012), Token Difference Operator"


class TDO(Analyzer):
    """Participation ratio and lambda_2 of D = Omega_mu^-1 A^T Omega_pi A, exactly.

    Results: `participation_ratio` in (0, 1]: the fraction of directions among tokens that the head keeps apart,
    and `lambda2`: its second eigenvalue (dimensionless). Other measures and scopes are named in the result:
    `participation_ratio_counting`, `participation_ratio_generation`, ...

    Keeps the Gram matrix: O(n^2) memory a head and O(n^2) time a row.

    Args:
        measure: "intrinsic" (default), "counting", "positional", "zipf" or "unembedding" (SPEC of each: see
            `attnprobe.functional.measures`). The last two read token ids.
        scope: "prefix": all tokens so far; "generation": the generation block, rows renormalised;
            "generation-raw": the same with raw rows.
        lambda2: also compute lambda_2 (final value only; one Lanczos iteration a head at the end).
        trace: keep the participation ratio at every step.

    Raises:
        ValueError: unknown measure or scope.

    >>> import torch
    >>> from attnprobe import Rows, TDO
    >>> tdo = TDO(measure="counting")
    >>> tdo.update(Rows.from_pattern(torch.eye(4).reshape(1, 1, 4, 4)))
    >>> tdo.compute()["participation_ratio_counting"].tolist()
    [[1.0]]

    Source: [SG] arXiv 2610.06012.
    """

    def __init__(
        self,
        measure: str = "intrinsic",
        *,
        scope: str = "prefix",
        lambda2: bool = True,
        trace: bool = False,
    ) -> None:
        super().__init__(trace=trace)
        if measure not in MEASURES:
            raise ValueError(f"unknown measure {measure!r}: choose one of {', '.join(MEASURES)}.")
        if scope not in SCOPES:
            raise ValueError(f"unknown scope {scope!r}: choose one of {', '.join(SCOPES)}.")
        self.measure = measure
        self.scope = scope
        self.lambda2 = lambda2
        suffix = "".join(
            f"_{part.replace('-', '_')}" for part in (measure, scope) if part not in ("intrinsic", "prefix")
        )
        self.ratio_name = f"participation_ratio{suffix}"
        self.lambda2_name = f"lambda2{suffix}"
        if self._by_token:
            self.needs = ("pattern", "tokens")

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results, with the measure and scope they belong to."""
        described = {"units": "1", "source": _SOURCE, "measure": self.measure, "scope": self.scope}
        return {
            self.ratio_name: {"long_name": "participation ratio (tr S)^2 / (n ||S||_F^2)", **described},
            self.lambda2_name: {"long_name": "second eigenvalue of the TDO", **described},
        }

    def update(self, rows: Rows) -> None:
        self._refuse(rows)
        scoped = self._scoped(rows)
        self._columns.update(scoped)
        self._gram.update(scoped)
        if self._by_token:
            self.use(Tokens, self.scope).update(scoped)

    def compute(self) -> dict[str, Tensor]:
        columns, gram = self._columns, self._gram
        mass = columns.mass
        if mass.shape[-1] == 0:
            nan = mass.new_full(mass.shape[:-1], torch.nan)
            return {self.ratio_name: nan} | ({self.lambda2_name: nan} if self.lambda2 else {})
        count = columns.count[:, None]
        weights = prefix_key_weights(mass.unsqueeze(-2), count[..., None], self._measure()).squeeze(-2)
        if self.lambda2 and self._known_first_pair:
            square, second = gram.intrinsic_spectrum(columns)
        else:
            square = gram.matrix.weighted_square(weights.unsqueeze(-2)).squeeze(-1)
            second = self._second_eigenvalue(weights) if self.lambda2 else square
        trace = (columns.energy * weights).sum(-1)
        result = {self.ratio_name: safe_divide(trace.square(), count * square)}
        if self.lambda2:
            result[self.lambda2_name] = second
        seen = columns.count[:, None] > 0  # a generation block without rows has no number
        return {name: torch.where(seen, value, torch.nan) for name, value in result.items()}

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        scoped = self._scoped(rows)
        if scoped.pattern.shape[-1] == 0:  # a generation block before the first generated token
            return {self.ratio_name: torch.full_like(scoped.pattern.sum(-1), torch.nan)}
        columns, gram = self._columns, self._gram
        mass, energy = columns.before(scoped)
        measure: Measure = self.measure
        if self._by_token:
            measure = self._weights_of(scoped.tokens, scoped.sink is not None).to(mass)
        position = scoped.position[:, None]
        ratio = prefix_ratio_of_rows(gram.matrix, mass, energy, scoped.keys, position, measure)
        return {self.ratio_name: torch.where(position >= 0, ratio, torch.nan)}

    @property
    def _columns(self) -> Columns:
        return self.use(Columns, self.scope)

    @property
    def _gram(self) -> Gram:
        return self.use(Gram, self.scope)

    def _scoped(self, rows: Rows) -> Rows:
        if self.scope == "prefix":
            return rows
        return rows.generation_block(renormalize=self.scope == "generation")

    def _refuse(self, rows: Rows) -> None:
        if self.measure == "unembedding" and self.leverage is None:
            raise ValueError("the measure 'unembedding' needs the host's unembedding matrix: use it in a Probe.")
        if self.measure != "positional":
            return
        if not (rows.causal and rows.self_attention):
            raise ValueError(
                "the positional measure is the pullback of uniform causal attention; this site is not causal."
            )
        if rows.sink is not None:
            raise ValueError("the positional measure has no place for a sink key: use rows='renormalize'.")

    @property
    def _by_token(self) -> bool:
        return self.measure in ("zipf", "unembedding")

    def _measure(self) -> Measure:
        if self._by_token:
            return self._weights_of(self.use(Tokens, self.scope).ids, self._columns.sunk).to(self._columns.mass)
        return self.measure

    def _weights_of(self, tokens: Tensor | None, sunk: bool) -> Float[Tensor, "batch 1 key"]:
        """mu by token, sum 1 over the tokens. A sink is no token: it gets their mean weight (our reading)."""
        if tokens is None:
            raise ValueError(f"the measure {self.measure!r} needs token ids and the host shows none here.")
        present = tokens >= 0
        if self.leverage is not None and self.measure == "unembedding":
            mu = unembedding_measure(tokens.clamp_min(0), self.leverage)
        else:
            mu = zipf_measure(tokens.clamp_min(0))
        mu = mu * present
        mu = mu / mu.sum(-1, keepdim=True).clamp_min(torch.finfo(mu.dtype).tiny)
        if sunk:
            mu = torch.cat([1 / present.sum(-1, keepdim=True).clamp_min(1).to(mu), mu], -1)
        return mu.unsqueeze(1)

    @property
    def _known_first_pair(self) -> bool:
        """lambda_1 = 1 with the constant function: for the intrinsic measure of rows that are distributions."""
        return self.measure == "intrinsic" and self.scope != "generation-raw"

    def _second_eigenvalue(self, weights: Float[Tensor, "batch head key"]) -> Float[Tensor, "batch head"]:
        """From the whole spectrum, where no eigenpair is known beforehand."""
        if weights.shape[-1] == 1:
            return torch.zeros_like(weights[..., 0])
        matrix = self._gram.matrix.dense(weights.expand(self._columns.mass.shape).sqrt())
        second = torch.linalg.eigvalsh(matrix)[..., -2].clamp_min(0.0)
        # pi = 1/n is in the intrinsic and positional weights already, and 1 under the counting measure
        return second / self._columns.count[:, None] if self._by_token else second


class IntrinsicTDO(TDO):
    """The Token Difference Operator under the intrinsic measure mu = A^T pi of the head itself.

    Results: `participation_ratio` in (0, 1] and `lambda2` in [0, 1]. A copy map has participation ratio 1, a map
    that sends every query to one key has 1/n, whatever mass a head keeps on a sink beside what it routes.

    Args:
        scope, lambda2, trace: as in `TDO`.

    >>> import torch
    >>> from attnprobe import IntrinsicTDO, Rows
    >>> sink = torch.zeros(1, 1, 4, 4)
    >>> sink[..., 0] = 1
    >>> tdo = IntrinsicTDO()
    >>> tdo.update(Rows.from_pattern(sink))
    >>> {name: value.item() for name, value in tdo.compute().items()}
    {'participation_ratio': 0.25, 'lambda2': 0.0}

    Source: [SG] arXiv 2610.06012.
    """

    def __init__(self, *, scope: str = "prefix", lambda2: bool = True, trace: bool = False) -> None:
        super().__init__("intrinsic", scope=scope, lambda2=lambda2, trace=trace)
