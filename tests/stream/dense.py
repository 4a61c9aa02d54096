"""Dense definitions and feeding helpers for the streaming tests: everything from whole matrices, nothing shared."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

import attnprobe as ap

functional = ap.functional

# Square roots of numbers that may vanish: compared squared, where rounding is not blown up.
ROOTS = {"asymmetry_curl", "asymmetry_gradient", "gain", "gain_bound"}


@dataclass
class Attention:
    """One batch of attention on whole sequences: a causal (or not) pattern and what goes with it."""

    pattern: Tensor  # [batch, head, n, n]
    v: Tensor  # [batch, n, kv_head, d]
    tokens: Tensor  # [batch, n]
    fields: dict[str, object] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.pattern.shape[-1]

    @property
    def v_by_head(self) -> Tensor:
        """[batch, head, n, d]"""
        group = self.pattern.shape[1] // self.v.shape[2]
        return self.v.transpose(1, 2).repeat_interleave(group, 1)

    @property
    def z(self) -> Tensor:
        """[batch, n, head, d]"""
        return (self.pattern @ self.v_by_head).transpose(1, 2)

    def rows(self, low: int, high: int) -> ap.Rows:
        keys = high if self.fields.get("causal", True) else self.n
        return ap.Rows.from_pattern(
            self.pattern[..., low:high, :keys],
            start=low,
            z=self.z[:, low:high],
            v=self.v[:, low:high],
            tokens=self.tokens[:, :keys],
            **self.fields,
        )

    def chunks(self, cuts: list[int]) -> list[ap.Rows]:
        edges = sorted({0, self.n, *(min(cut, self.n) for cut in cuts)})
        return [self.rows(low, high) for low, high in itertools.pairwise(edges)]

    def prefix(self, n: int) -> Attention:
        return Attention(self.pattern[..., :n, :n], self.v[:, :n], self.tokens[:, :n], self.fields)

    def sequence(self, index: int, n: int | None = None) -> Attention:
        one = slice(index, index + 1)
        return Attention(self.pattern[one], self.v[one], self.tokens[one], self.fields).prefix(n or self.n)


def random_attention(
    n: int,
    seed: int = 0,
    *,
    batch: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    d: int = 3,
    scale: float = 2.0,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Attention:
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(batch, heads, n, n, generator=generator, dtype=torch.float64)
    if causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    v = torch.randn(batch, n, kv_heads, d, generator=generator, dtype=torch.float64) + 0.5
    tokens = torch.randint(0, 50, (batch, n), generator=generator)
    fields: dict[str, object] = {} if causal else {"causal": False}
    return Attention(scores.softmax(-1).to(dtype), v.to(dtype), tokens, fields)


def feed(analyzer: ap.Analyzer, chunks: list[ap.Rows]) -> dict[str, Tensor]:
    for rows in chunks:
        analyzer.update(rows)
    return analyzer.compute()


def traced(analyzer: ap.Analyzer, chunks: list[ap.Rows]) -> dict[str, Tensor]:
    parts = []
    for rows in chunks:
        parts.append(analyzer.trace_rows(rows))
        analyzer.update(rows)
    return {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}


def intrinsic(a: Attention, **how: object) -> dict[str, Tensor]:
    spectrum = functional.tdo_spectrum(a.pattern, **how)
    return {
        "participation_ratio": functional.participation_ratio(a.pattern, **how),
        "lambda2": spectrum[..., 1] if spectrum.shape[-1] > 1 else torch.zeros_like(spectrum[..., 0]),
    }


def routing(a: Attention, **how: object) -> dict[str, Tensor]:
    split = functional.routing_split(a.pattern, a.v_by_head, **how)
    named = split._asdict()
    named["gain_bound"] = named.pop("bound")
    return named


def entropy(a: Attention, **how: object) -> dict[str, Tensor]:
    bound = functional.entropy_bound(a.pattern, a.v_by_head, **how)
    return {
        "entropy": bound.entropy,
        "centered_entropy": bound.centered_entropy,
        "entropy_lower": bound.lower,
        "entropy_upper": bound.upper,
    }


def transport(a: Attention) -> dict[str, Tensor]:
    return functional.prefix_capacity(a.pattern)._asdict()


def direction(a: Attention) -> dict[str, Tensor]:
    split = functional.hodge_split(a.pattern)
    return {
        "asymmetry": split.asymmetry,
        "asymmetry_gradient": split.gradient,
        "asymmetry_curl": split.curl,
    }


def self_attention(a: Attention) -> dict[str, Tensor]:
    return {"self_attention": a.pattern.diagonal(dim1=-2, dim2=-1).mean(-1)}


def previous_token(a: Attention) -> dict[str, Tensor]:
    return {"previous_token_attention": a.pattern.diagonal(-1, dim1=-2, dim2=-1).mean(-1)}


def laplacian(a: Attention) -> dict[str, Tensor]:
    n, pattern = a.n, a.pattern
    eigenvalues = [pattern[..., i:, i].sum(-1) / (n - i) - pattern[..., i, i] for i in range(n)]
    return {"laplacian_eigenvalue_mean": torch.stack(eigenvalues, -1).clamp(0, 1).mean(-1)}


def log_determinant(a: Attention) -> dict[str, Tensor]:
    total = a.pattern.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return {"log_determinant": total, "log_determinant_mean": total / a.n}


# name -> (analyzer, its dense definition)
ANALYZERS = {
    "IntrinsicTDO": (ap.IntrinsicTDO, intrinsic),
    "MeanRoutingSplit": (ap.MeanRoutingSplit, routing),
    "SpectralEntropyBound": (ap.SpectralEntropyBound, entropy),
    "TransportCapacity": (ap.TransportCapacity, transport),
    "Asymmetry": (ap.Asymmetry, direction),
    "LaplacianEigenvalues": (ap.LaplacianEigenvalues, laplacian),
    "LogDeterminant": (ap.LogDeterminant, log_determinant),
    "SelfAttention": (ap.SelfAttention, self_attention),
    "PreviousTokenAttention": (ap.PreviousTokenAttention, previous_token),
}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, value in found.items():
        there, wanted = value.double(), expected[name].double()
        if name in ROOTS:
            there, wanted = there.square(), wanted.square()
        torch.testing.assert_close(
            there, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )


def dense_tdo(a: Tensor, mu: Tensor | None = None, pi: float | None = None) -> Tensor:
    """S of one pattern [query, key], literally: Omega_mu^-1/2 A^T Omega_pi A Omega_mu^-1/2 on keys with mass."""
    n = a.shape[0]
    pi = 1 / n if pi is None else pi
    mu = a.sum(0) / n if mu is None else mu
    inside = (mu > 0) & (a.sum(0) > 0)
    half = a[:, inside] * pi**0.5 / mu[inside].sqrt()
    return half.T @ half


def dense_ratio(s: Tensor, n: int) -> float:
    return float(s.trace() ** 2 / (n * s.square().sum()))


def dense_second(s: Tensor) -> float:
    return float(torch.linalg.eigvalsh(s)[-2]) if s.shape[0] > 1 else 0.0


def dense_measure(name: str, a: Tensor, tokens: Tensor, leverage: Tensor) -> tuple[Tensor, float]:
    """mu and pi of SPEC section 2 for one causal pattern [n, n]."""
    n = a.shape[0]
    if name == "intrinsic":
        return a.sum(0) / n, 1 / n
    if name == "counting":
        return torch.ones(n, dtype=a.dtype), 1.0
    if name == "positional":
        return torch.tensor([sum(1 / i for i in range(j, n + 1)) / n for j in range(1, n + 1)], dtype=a.dtype), 1 / n
    weight = 1 / (tokens.to(a) + 2.7) if name == "zipf" else leverage[tokens]
    return weight / weight.sum(), 1 / n
