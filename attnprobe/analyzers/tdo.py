"""The Token Difference Operator of a head: participation ratio, exact or sketched, and second eigenvalue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.gram import prefix_key_weights, prefix_ratio_of_rows
from attnprobe.functional.measures import Measure, zipf_measure
from attnprobe.functional.patterns import safe_divide
from attnprobe.functional.sketch import (
    SketchedRatio,
    check_rank,
    ratio_of_square,
    sketched_ratio_of_rows,
    sketched_square,
)
from attnprobe.rows import Rows
from attnprobe.state import Columns, Gram, Queries, Sketch, Tokens

MEASURES = ("intrinsic", "counting", "positional", "zipf", "unembedding")
SCOPES = ("prefix", "generation", "generation-raw")
METHODS = ("exact", "sketch")
_SOURCE = "Spectral Geometry of Attention (arXiv 2610.06012), Token Difference Operator"


class TDO(Analyzer):
    """Participation ratio and lambda_2 of D = Omega_mu^-1 A^T Omega_pi A.

    Results: `participation_ratio` in (0, 1]: the fraction of directions among tokens that the head keeps apart,
    and `lambda2`: its second eigenvalue (dimensionless). Other measures and scopes are named in the result:
    `participation_ratio_counting`, `participation_ratio_generation`, ...

    `method="exact"` keeps the Gram matrix: O(n^2) memory a head and O(n^2) time a row. `method="sketch"` keeps `rank`
    random combinations of the rows: O(rank n) of both, worth it for texts several times longer than the rank. Its
    participation ratio is an estimate, with `participation_ratio_standard_error` beside it, and lambda_2 is left out.
    A step of a trace costs the sketch O(rank^2 n): it saves memory there, and time only in very long texts.

    Args:
        measure: "intrinsic" (default), "counting", "positional", "zipf" or "unembedding" (SPEC of each: see
            `attnprobe.functional.measures`). The last two read token ids.
        scope: "prefix": all tokens so far; "generation": the generation block, rows renormalised;
            "generation-raw": the same with raw rows.
        method: "exact" (default) or "sketch".
        rank: rows of the sketch, at least 16. The relative error is about 2/rank for most heads.
        seed: of the sketch's random signs; the same seed gives the same numbers.
        lambda2: also compute lambda_2 (final value only, by Lanczos iteration at the end). By default with the exact
            method. Beside a sketch it needs a host that shows queries and keys (a plain transformers model): they are
            kept, and the rows are computed again about ten times.
        trace: keep the participation ratio at every step; stride: at every stride-th, held between.

    Raises:
        ValueError: unknown measure, scope or method, a rank or seed out of range, or lambda2 of a sketch.

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
        method: str = "exact",
        rank: int = 128,
        seed: int = 0,
        lambda2: bool | None = None,
        trace: bool = False,
        stride: int = 1,
    ) -> None:
        super().__init__(trace=trace, stride=stride)
        if measure not in MEASURES:
            raise ValueError(f"unknown measure {measure!r}: choose one of {', '.join(MEASURES)}.")
        if scope not in SCOPES:
            raise ValueError(f"unknown scope {scope!r}: choose one of {', '.join(SCOPES)}.")
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}.")
        check_rank(rank, seed)
        if method == "sketch" and lambda2 and (measure != "intrinsic" or scope != "prefix"):
            raise ValueError(
                "beside a sketch, lambda_2 is computed for the intrinsic measure over the whole prefix only: use "
                "method='exact', or leave lambda2 out."
            )
        self.measure = measure
        self.scope = scope
        self.method = method
        self.rank = rank
        self.seed = seed
        self.lambda2 = method == "exact" if lambda2 is None else lambda2
        suffix = "".join(
            f"_{part.replace('-', '_')}" for part in (measure, scope) if part not in ("intrinsic", "prefix")
        )
        self.ratio_name = f"participation_ratio{suffix}"
        self.error_name = f"{self.ratio_name}_standard_error"
        self.lambda2_name = f"lambda2{suffix}"
        if self._by_token:
            self.needs = ("pattern", "tokens")

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results, with the measure and scope they belong to."""
        described = {"units": "1", "source": _SOURCE, "measure": self.measure, "scope": self.scope}
        ratio = "participation ratio (tr S)^2 / (n ||S||_F^2)"
        if self._sketched:
            described["method"] = f"random-sign sketch of rank {self.rank}, seed {self.seed}"
            return {
                self.ratio_name: {"long_name": ratio, **described},
                self.error_name: {"long_name": "standard error of the estimated participation ratio", **described},
                self.lambda2_name: {"long_name": "second eigenvalue of the TDO", **described},
            }
        return {
            self.ratio_name: {"long_name": ratio, **described},
            self.lambda2_name: {"long_name": "second eigenvalue of the TDO", **described},
        }

    def update(self, rows: Rows) -> None:
        self._refuse(rows)
        scoped = self._scoped(rows)
        self._columns.update(scoped)
        (self._sketch if self._sketched else self._gram).update(scoped)
        if self._sketched and self.lambda2:
            self.use(Queries).update(rows)
        if self._by_token:
            self.use(Tokens, self.scope).update(scoped)

    def compute(self) -> dict[str, Tensor]:
        columns = self._columns
        mass = columns.mass
        if mass.shape[-1] == 0:
            nan = mass.new_full(mass.shape[:-1], torch.nan)
            return dict.fromkeys(self._ratio_names, nan) | ({self.lambda2_name: nan} if self.lambda2 else {})
        count = columns.count[:, None]
        weights = prefix_key_weights(mass.unsqueeze(-2), count[..., None], self._measure()).squeeze(-2)
        trace = (columns.energy * weights).sum(-1)
        if self._sketched:
            estimate = sketched_square(self._sketch.value, mass, count, weights, trace)
            result = self._named(ratio_of_square(trace, count, estimate))
            if self.lambda2:
                result[self.lambda2_name] = self.use(Queries).second_eigenvalue(mass)
        else:
            result = self._exact(weights, trace)
        seen = count > 0  # a generation block without rows has no number
        return {name: torch.where(seen, value, torch.nan) for name, value in result.items()}

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        return self.trace_together([self], rows)

    @classmethod
    def trace_together(cls, analyzers: Sequence[TDO], rows: Rows) -> dict[str, Tensor]:
        """The ratios of several measures, those of one scope in one pass over its Gram matrix."""
        shared: dict[tuple[int, str, int], list[TDO]] = {}
        for i, tdo in enumerate(analyzers):  # each sketch is its own
            shared.setdefault((id(tdo.pool), tdo.scope, i if tdo._sketched else -1), []).append(tdo)
        return {name: value for some in shared.values() for name, value in _traced(some, rows).items()}

    def merge(self, other: Analyzer) -> None:
        """Add what another analyzer with the same settings saw: other rows of the same sequences.

        Raises:
            TypeError: the other is of another class.
            ValueError: its settings differ, so that it kept other sums.
        """
        if isinstance(other, TDO) and other._settings != self._settings:
            raise ValueError(f"cannot merge {other!r} into {self!r}: their settings differ.")
        super().merge(other)

    @property
    def _settings(self) -> tuple[object, ...]:
        """What decides which sums are kept."""
        sketch = (self.rank, self.seed, self.lambda2) if self._sketched else ()
        return (self._by_token, self.scope, self.method, *sketch)

    @property
    def _sketched(self) -> bool:
        return self.method == "sketch"

    @property
    def _ratio_names(self) -> tuple[str, ...]:
        return (self.ratio_name, self.error_name) if self._sketched else (self.ratio_name,)

    def _named(self, estimate: SketchedRatio) -> dict[str, Tensor]:
        return dict(zip(self._ratio_names, estimate, strict=True))

    def _exact(
        self, weights: Float[Tensor, "batch head key"], trace: Float[Tensor, "batch head"]
    ) -> dict[str, Float[Tensor, "batch head"]]:
        columns, gram = self._columns, self._gram
        if self.lambda2 and self._known_first_pair:
            square, second = gram.intrinsic_spectrum(columns)
        else:
            square = gram.matrix.weighted_square(weights.unsqueeze(-2)).squeeze(-1)
            second = self._second_eigenvalue(weights) if self.lambda2 else square
        ratio = safe_divide(trace.square(), columns.count[:, None] * square)
        return {self.ratio_name: ratio} | ({self.lambda2_name: second} if self.lambda2 else {})

    @property
    def _columns(self) -> Columns:
        return self.use(Columns, self.scope)

    @property
    def _gram(self) -> Gram:
        return self.use(Gram, self.scope)

    @property
    def _sketch(self) -> Sketch:
        return self.use(Sketch, self.scope, rank=self.rank, seed=self.seed)

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

    def _measure_of(self, rows: Rows, like: Tensor) -> Measure:
        """The measure at rows that have not been taken yet."""
        return self._weights_of(rows.tokens, rows.sink is not None).to(like) if self._by_token else self.measure

    def _weights_of(self, tokens: Tensor | None, sunk: bool) -> Float[Tensor, "batch 1 key"]:
        """mu by token, sum 1 over the tokens. A sink is no token: it gets their mean weight (our reading)."""
        if tokens is None:
            raise ValueError(f"the measure {self.measure!r} needs token ids and the host shows none here.")
        present = tokens >= 0
        if self.leverage is not None and self.measure == "unembedding":
            # not `unembedding_measure`, which refuses tokens that have no weight at all: a padding token that is
            # generated, or a generation block that has no token yet
            mu = self.leverage.to(tokens.device)[tokens.clamp_min(0)]
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


def _traced(some: Sequence[TDO], rows: Rows) -> dict[str, Float[Tensor, "batch head query"]]:
    """The ratio of the prefix that ends at each row, by analyzers that share their sums."""
    first = some[0]
    scoped = first._scoped(rows)
    if scoped.pattern.shape[-1] == 0:  # a generation block before the first generated token
        nan = torch.full_like(scoped.pattern.sum(-1), torch.nan)
        return {name: nan for tdo in some for name in tdo._ratio_names}
    mass, energy = first._columns.before(scoped)
    position = scoped.position[:, None]
    measures = [tdo._measure_of(scoped, mass) for tdo in some]
    if first._sketched:
        sketches = first._sketch.prefixes(scoped)
        found = first._named(sketched_ratio_of_rows(sketches, mass, energy, scoped.keys, position, measures[0]))
    else:
        ratios = prefix_ratio_of_rows(first._gram.matrix, mass, energy, scoped.keys, position, measures)
        found = {tdo.ratio_name: ratio for tdo, ratio in zip(some, ratios, strict=True)}
    return {name: torch.where(position >= 0, value, torch.nan) for name, value in found.items()}


class IntrinsicTDO(TDO):
    """The Token Difference Operator under the intrinsic measure mu = A^T pi of the head itself.

    Results: `participation_ratio` in (0, 1] and `lambda2` in [0, 1]. A copy map has participation ratio 1, a map
    that sends every query to one key has 1/n, whatever mass a head keeps on a sink beside what it routes. With
    `method="sketch"`: `participation_ratio` and `participation_ratio_standard_error`.

    Args:
        scope, method, rank, seed, lambda2, trace, stride: as in `TDO`.

    >>> import torch
    >>> from attnprobe import IntrinsicTDO, Rows
    >>> sink = torch.zeros(1, 1, 4, 4)
    >>> sink[..., 0] = 1
    >>> tdo = IntrinsicTDO()
    >>> tdo.update(Rows.from_pattern(sink))
    >>> {name: value.item() for name, value in tdo.compute().items()}
    {'participation_ratio': 0.25, 'lambda2': 0.0}
    >>> tdo = IntrinsicTDO(method="sketch", rank=16)
    >>> tdo.update(Rows.from_pattern(sink))
    >>> {name: round(value.item(), 3) for name, value in tdo.compute().items()}
    {'participation_ratio': 0.25, 'participation_ratio_standard_error': 0.0}

    Source: [SG] arXiv 2610.06012.
    """

    def __init__(
        self,
        *,
        scope: str = "prefix",
        method: str = "exact",
        rank: int = 128,
        seed: int = 0,
        lambda2: bool | None = None,
        trace: bool = False,
        stride: int = 1,
    ) -> None:
        super().__init__(
            "intrinsic",
            scope=scope,
            method=method,
            rank=rank,
            seed=seed,
            lambda2=lambda2,
            trace=trace,
            stride=stride,
        )
