"""Transport capacity: how wide the narrowest cut is that attention has to carry mass through.

The bipartite graph joins queries to keys with weights A; degrees are row sums and column sums. A cut puts
some queries Q and some keys K on one side:

    phi(Q, K) = cut / min(vol, total - vol)
    cut = A[Q, not K] + A[not Q, K],        vol = sum_{i in Q} row_i + sum_{j in K} c_j

Keys that nothing attends to have no edges: they are outside the graph. All sums are taken in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from attnprobe.functional.patterns import CheckedPattern, check_pattern, inverse_root, safe_divide

_TIME_CUT = "a time cut splits queries and keys at the same token"


class PrefixCapacity(NamedTuple):
    """The narrowest time cut: `phi` its conductance, `cut` = t*/n its place; NaN for a single token."""

    phi: Float[Tensor, "*batch"]
    cut: Float[Tensor, "*batch"]


class ThresholdCapacity(NamedTuple):
    """The narrowest threshold cut: its conductance and the fractions a/n_query and b/n_key; each [...]."""

    phi: Float[Tensor, "*batch"]
    query_cut: Float[Tensor, "*batch"]
    key_cut: Float[Tensor, "*batch"]


class SpectralCapacity(NamedTuple):
    """The certified bracket of the conductance phi*, each [...]: lower <= phi* <= sweep <= upper.

    Attributes:
        sigma2: second singular value of D_Q^-1/2 A D_K^-1/2, in [0, 1].
        lower: (1 - sigma2) / 2.
        upper: sqrt(2 (1 - sigma2)).
        sweep: smallest conductance over the sweep cuts of the second singular vectors: a cut that exists.
    """

    sigma2: Float[Tensor, "*batch"]
    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]
    sweep: Float[Tensor, "*batch"]


def prefix_landscape(
    pattern: Float[Tensor, "*batch query key"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch cut"]:
    """Conductance of every time cut {queries <= t} u {keys <= t}, t = 1..n-1.

        causal:  phi(t) = (C(t) - t) / min(t + C(t), 2n - t - C(t)),      C(t) = sum_{j <= t} c_j

    For a pattern that is not causal the mass that crosses the cut in the other direction is counted too.

    Args:
        pattern: [..., n, n], rows sum to 1.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused.

    Returns:
        [..., n-1], fractions in [0, 1]; NaN for t >= length of a masked sequence.

    Raises:
        ValueError: not a square pattern (`check_pattern`).

    >>> import torch
    >>> from attnprobe.functional import prefix_landscape
    >>> prefix_landscape(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [0.3333333432674408]

    Source: [ST] prefix cuts.
    """
    return _landscape(check_pattern(pattern, rows=rows, mask=mask, square=True, why=_TIME_CUT))


def prefix_capacity(
    pattern: Float[Tensor, "*batch query key"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> PrefixCapacity:
    """The narrowest time cut of a self-attention pattern.

        phi = min_t phi(t),     cut = t*/n          (`prefix_landscape`; ties go to the smallest t)

    Args:
        pattern: [..., n, n], rows sum to 1.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused.

    Returns:
        `PrefixCapacity`, both fractions. A single token has no time cut: NaN.

    Raises:
        ValueError: not a square pattern (`check_pattern`).

    >>> import torch
    >>> from attnprobe.functional import prefix_capacity
    >>> uniform = torch.ones(1000, 1000, dtype=torch.float64).tril()
    >>> worst = prefix_capacity(uniform / uniform.sum(-1, keepdim=True))
    >>> round(worst.phi.item(), 3), round(worst.cut.item(), 3)
    (0.364, 0.318)

    Source: [ST] prefix capacity.
    """
    checked = check_pattern(pattern, rows=rows, mask=mask, square=True, why=_TIME_CUT)
    return _narrowest(_landscape(checked), checked.length)


def landscape_from_columns(
    column_mass: Float[Tensor, "*batch key"],
    length: Int[Tensor, "*batch"] | None = None,
    block_mass: Float[Tensor, "*batch key"] | None = None,
) -> Float[Tensor, "*batch cut"]:
    """The prefix landscape of a square pattern from its column masses, alone if it is causal.

        phi(t) = (C(t) + t - 2 W(t)) / min(t + C(t), 2n - t - C(t)),      C(t) = sum_{j <= t} c_j

    Args:
        column_mass: [..., key] sums of the columns over the `length` rows so far.
        length: [...] number of rows n; the number of keys by default.
        block_mass: [..., key] W(t), the mass among the first t queries and keys; t for a causal pattern.

    Returns:
        [..., key - 1], in the dtype of the column masses; NaN for t >= length. Nothing is checked.

    >>> import torch
    >>> from attnprobe.functional import landscape_from_columns
    >>> landscape_from_columns(torch.tensor([1.5, 0.5])).tolist()
    [0.3333333432674408]

    Source: [ST] prefix cuts; the causal shortcut follows from unit row sums.
    """
    size = _row_count(column_mass, length)
    position = torch.arange(1, column_mass.shape[-1] + 1, device=column_mass.device)
    count = torch.minimum(position, size.unsqueeze(-1)).double()
    # A causal row sums to 1 inside its own prefix, so the block of the first t rows and columns holds mass t.
    within = count if block_mass is None else block_mass.double()
    return _time_cuts(count, column_mass.double().cumsum(-1), within, size).to(column_mass.dtype)


def capacity_from_columns(
    column_mass: Float[Tensor, "*batch key"],
    length: Int[Tensor, "*batch"] | None = None,
    block_mass: Float[Tensor, "*batch key"] | None = None,
) -> PrefixCapacity:
    """Prefix capacity of a square pattern from its column masses; see `landscape_from_columns`.

    >>> import torch
    >>> from attnprobe.functional import capacity_from_columns
    >>> capacity_from_columns(torch.tensor([1.5, 0.5])).cut.item()
    0.5

    Source: [ST] prefix capacity.
    """
    landscape = landscape_from_columns(column_mass, length, block_mass)
    return _narrowest(landscape, _row_count(column_mass, length))


def threshold_capacity(
    pattern: Float[Tensor, "*batch query key"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> ThresholdCapacity:
    """The narrowest cut that splits queries at one place and keys at another.

        phi = min over a, b of phi({queries <= a} u {keys <= b}),      without the cuts of volume 0

    Args:
        pattern: [..., query, key], rows sum to 1; rectangular and bidirectional patterns are fine.
        rows, mask: as in `check_pattern`; the key of `rows="sink"` comes first and counts as one of the keys.

    Returns:
        `ThresholdCapacity`, all fractions; ties go to the smallest a, then the smallest b. Memory is a few
        times that of the pattern in float64.

    Raises:
        ValueError: not a pattern (`check_pattern`).

    >>> import torch
    >>> from attnprobe.functional import threshold_capacity
    >>> threshold_capacity(torch.eye(2))
    ThresholdCapacity(phi=tensor(0.), query_cut=tensor(0.5000), key_cut=tensor(0.5000))

    Source: [ST] threshold cuts.
    """
    checked = check_pattern(pattern, rows=rows, mask=mask)
    phi = _threshold_cuts(checked.pattern.double())
    n_thresholds = phi.shape[-1]
    flat = phi.flatten(-2)
    where = flat.argmin(-1, keepdim=True)
    first, second = where.squeeze(-1) // n_thresholds, where.squeeze(-1) % n_thresholds
    return ThresholdCapacity(
        phi=flat.gather(-1, where).squeeze(-1).to(checked.dtype),
        query_cut=(first.double() / checked.length).to(checked.dtype),
        key_cut=(second.double() / checked.key_length).to(checked.dtype),
    )


def spectral_capacity(
    pattern: Float[Tensor, "*batch query key"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> SpectralCapacity:
    """Bracket of the conductance over all cuts, from the second singular pair.

        (1 - sigma_2)/2 <= phi* <= sweep <= sqrt(2 (1 - sigma_2)),      sigma_2 of M = D_Q^-1/2 A D_K^-1/2

    sigma_2^2 is lambda_2 of the intrinsic TDO. The sweep sorts queries and keys together along
    (D_Q^-1/2 u_2, D_K^-1/2 v_2) and takes the best of the cuts in between, weighed with A: that is the graph
    for which the bracket is a theorem.

    Args:
        pattern: [..., query, key], rows sum to 1; rectangular and bidirectional patterns are fine.
        rows, mask: as in `check_pattern`.

    Returns:
        `SpectralCapacity`; computed in float64. With a single query or a single key there is no second
        singular value: sigma2 is 0.

    Raises:
        ValueError: not a pattern (`check_pattern`).

    >>> import torch
    >>> from attnprobe.functional import spectral_capacity
    >>> capacity = spectral_capacity(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    >>> round(capacity.sigma2.item(), 4), round(capacity.sweep.item(), 4)
    (0.5774, 0.3333)

    Source: [ST] spectral capacity and its Cheeger bracket.
    """
    checked = check_pattern(pattern, rows=rows, mask=mask)
    weights = checked.pattern.double()
    sigma2, query_position, key_position = _second_pair(weights)
    return SpectralCapacity(
        sigma2=sigma2.to(checked.dtype),
        lower=((1 - sigma2) / 2).to(checked.dtype),
        upper=(2 * (1 - sigma2)).sqrt().to(checked.dtype),
        sweep=_sweep(weights, query_position, key_position).to(checked.dtype),
    )


def normalized_operator(weights: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query key"]:
    """M = D_Q^-1/2 A D_K^-1/2; keys without mass give zero columns."""
    query_scale, key_scale = inverse_root(weights.sum(-1)), inverse_root(weights.sum(-2))
    return query_scale.unsqueeze(-1) * weights * key_scale.unsqueeze(-2)


def _row_count(column_mass: Tensor, length: Tensor | None) -> Int[Tensor, "*batch"]:
    if length is not None:
        return length
    return torch.full(column_mass.shape[:-1], column_mass.shape[-1], device=column_mass.device)


def _landscape(checked: CheckedPattern) -> Float[Tensor, "*batch cut"]:
    weights = checked.pattern.double()
    # Mass that token t adds to the block of the first t queries and keys.
    arriving = weights.tril().sum(-1) + weights.triu(1).sum(-2)
    query_mass, key_mass = weights.sum(-1), weights.sum(-2)
    phi = _time_cuts(query_mass.cumsum(-1), key_mass.cumsum(-1), arriving.cumsum(-1), checked.length)
    return phi.to(checked.dtype)


def _time_cuts(
    query_mass: Float[Tensor, "*batch token"],
    key_mass: Float[Tensor, "*batch token"],
    block_mass: Float[Tensor, "*batch token"],
    length: Int[Tensor, "*batch"],
) -> Float[Tensor, "*batch cut"]:
    """phi of the time cuts, from running row sums, column sums and mass within the first t tokens."""
    volume = (query_mass + key_mass)[..., :-1]
    outside = (query_mass + key_mass)[..., -1:] - volume
    cut = (volume - 2 * block_mass[..., :-1]).clamp_min(0.0)
    exists = torch.arange(1, query_mass.shape[-1], device=length.device) < length.unsqueeze(-1)
    return (cut / torch.minimum(volume, outside)).where(exists, torch.nan)


def _narrowest(landscape: Float[Tensor, "*batch cut"], length: Int[Tensor, "*batch"]) -> PrefixCapacity:
    # One cut more, of width infinity, so that a single token has a (missing) minimum too.
    filled = pad(landscape.where(~landscape.isnan(), torch.inf), (0, 1), value=torch.inf)
    where = filled.argmin(-1, keepdim=True)
    phi = filled.gather(-1, where).squeeze(-1)
    cut = ((where.squeeze(-1) + 1).double() / length).to(phi.dtype)
    return PrefixCapacity(phi.where(length > 1, torch.nan), cut.where(length > 1, torch.nan))


def _threshold_cuts(weights: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query_cut key_cut"]:
    """phi of {queries < a} u {keys < b}, a = 0..n_query, b = 0..n_key; infinite where a side is empty."""
    query_mass, key_mass = weights.sum(-1), weights.sum(-2)
    volume = _before(query_mass, -1).unsqueeze(-1) + _before(key_mass, -1).unsqueeze(-2)
    outside = _after(query_mass, -1).unsqueeze(-1) + _after(key_mass, -1).unsqueeze(-2)
    # Sums of non-negative terms only: differences of totals would drown cuts around keys of tiny mass.
    cut = _after(_before(weights, -2), -1) + _before(_after(weights, -2), -1)
    return safe_divide(cut, torch.minimum(volume, outside), otherwise=torch.inf)


def _before(x: Tensor, dim: int) -> Tensor:
    """Sum of the entries before each of the n + 1 gaps along `dim`."""
    return pad(x.cumsum(dim), (1, 0) if dim == -1 else (0, 0, 1, 0))


def _after(x: Tensor, dim: int) -> Tensor:
    """Sum of the entries after each of the n + 1 gaps along `dim`."""
    return pad(x.flip(dim).cumsum(dim).flip(dim), (0, 1) if dim == -1 else (0, 0, 0, 1))


def _second_pair(
    weights: Float[Tensor, "*batch query key"],
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch query"], Float[Tensor, "*batch key"]]:
    """sigma_2, D_Q^-1/2 u_2 and D_K^-1/2 v_2; vertices without edges, which no cut feels, stand at 0."""
    query_mass, key_mass = weights.sum(-1), weights.sum(-2)
    total = query_mass.sum(-1)[..., None, None]
    # The first pair is known, sigma_1 = 1. Taking it out makes the second one the first, even when both are
    # 1.
    first_pair = query_mass.sqrt().unsqueeze(-1) * key_mass.sqrt().unsqueeze(-2) / total
    rest = normalized_operator(weights) - first_pair
    left = torch.linalg.eigh(rest @ rest.mT).eigenvectors[..., -1]
    right = (left.unsqueeze(-2) @ rest).squeeze(-2)
    # ||rest^T u|| and not the root of the eigenvalue, which would leave 1e-8 where sigma_2 is 0.
    sigma2 = torch.linalg.vector_norm(right, dim=-1).clamp(max=1.0)
    query_position = left * inverse_root(query_mass)
    # v = M^T u / sigma, so a key stands at the mean of the queries that attend to it, over sigma: the same
    # number as D_K^-1/2 v without dividing rounding errors by the root of a tiny mass.
    pulled = (query_position.unsqueeze(-2) @ weights).squeeze(-2)
    key_position = safe_divide(safe_divide(pulled, key_mass), sigma2.unsqueeze(-1))
    return sigma2, query_position, key_position


def _sweep(
    weights: Float[Tensor, "*batch query key"],
    query_position: Float[Tensor, "*batch query"],
    key_position: Float[Tensor, "*batch key"],
) -> Float[Tensor, "*batch"]:
    """Smallest phi over the cuts between neighbours when queries and keys are sorted together by position."""
    n_query = weights.shape[-2]
    by_query = query_position.argsort(dim=-1, stable=True).unsqueeze(-1)
    by_key = key_position.argsort(dim=-1, stable=True).unsqueeze(-2)
    sorted_weights = torch.take_along_dim(torch.take_along_dim(weights, by_query, -2), by_key, -1)
    phi = _threshold_cuts(sorted_weights)
    is_query = torch.cat([query_position, key_position], -1).argsort(dim=-1, stable=True) < n_query
    queries, keys = is_query.cumsum(-1), (~is_query).cumsum(-1)
    return phi.flatten(-2).gather(-1, queries * phi.shape[-1] + keys).amin(-1)
