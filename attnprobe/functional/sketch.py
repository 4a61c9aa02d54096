"""||S||_F^2 of the Token Difference Operator from a random-sign sketch of the rows, with its standard error.

With K = A W A^T (W the key weights: K has the nonzero spectrum of S = H^T H) and a matrix Pi [rank, query] of random
signs, only Pi A is kept: rank numbers a key instead of a row of the Gram matrix. What is known exactly is not left to
chance:

- u = 1/sqrt(n): u^T K u = sum_j c_j^2 w_j / n (1, with K u = u, under the intrinsic measure). With P = I - u u^T,

      ||K||^2 = (u^T K u)^2 + 2 ||P K u||^2 + ||P K P||^2,      tr P K P = tr K - u^T K u,      tr K = sum_j q_j w_j

- the mean eigenvalue of P K P, m = tr P K P / (n - 1): what is left to estimate is their spread,

      ||P K P||^2 = (n - 1) m^2 + ||P (K - m) P||^2

Z = Pi P (K - m) P Pi^T is at hand: the first part is Pi A with the column means taken out, the second the signs' own
products. For independent sign rows a and b, E Z_ab^2 = ||P (K - m) P||^2: the mean over all a != b estimates it without
bias. E Z_aa = 0 exactly, so the mean of the diagonal is an error that is seen; it is worth its regression slope, which
takes out most of what large eigenvalues add to the variance. The slope used for row a is that of the other rows, so the
estimate stays unbiased. Its variance is that of the jackknife over sign rows, which counts the part that comes in pairs
of rows twice: one half of it is taken off.

The error that remains is about 2/rank of ||P (K - m) P||^2 or less than twice that, whatever n is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnprobe.functional.gram import prefix_key_weights
from attnprobe.functional.measures import Measure, check_measured, key_weights
from attnprobe.functional.patterns import safe_divide

# With fewer sign rows the spread among them does not tell the error: at 8 the 95 % interval covers 88 to 93 %.
MIN_RANK = 16

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the multipliers of splitmix64
_MASK = (1 << 64) - 1


class SignSketch(NamedTuple):
    """What is kept of the rows: `sums` = Pi A, `sign_sum` = Pi 1 and `sign_gram` = Pi Pi^T over the rows so far.

    The signs are those of positions, so the last two may have axes of size 1 where heads share them.
    """

    sums: Float[Tensor, "*batch rank key"]
    sign_sum: Float[Tensor, "*#batch rank"]
    sign_gram: Float[Tensor, "*#batch rank rank"]


class SketchedSquare(NamedTuple):
    """An estimate of ||S||_F^2 and its standard error."""

    square: Float[Tensor, "*batch"]
    standard_error: Float[Tensor, "*batch"]


class SketchedRatio(NamedTuple):
    """An estimate of the participation ratio and its standard error."""

    participation_ratio: Float[Tensor, "*batch"]
    standard_error: Float[Tensor, "*batch"]


def check_rank(rank: int, seed: int) -> None:
    """Raise unless these are a rank and a seed that a sketch can have.

    Raises:
        ValueError: a rank below 16 or a seed below 0, or not whole numbers.
    """
    if not _whole(rank) or rank < MIN_RANK:
        raise ValueError(f"rank={rank!r}: a sketch needs a whole number of at least {MIN_RANK} rows to tell its error.")
    if not _whole(seed) or seed < 0:
        raise ValueError(f"seed={seed!r}: give a whole number, 0 or more.")


def sign_block(
    position: Int[Tensor, "*batch row"], rank: int, seed: int = 0, *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*batch rank row"]:
    """Random signs of positions: a function of (seed, position) alone, whatever is asked beside it.

    Bits of a hash (splitmix64) of the position, 64 sign rows a word: nothing is stored, all devices agree, and the
    signs of a smaller rank are the first of a larger one. A negative position is padding and has zeros.

    >>> import torch
    >>> from attnprobe.functional.sketch import sign_block
    >>> sign_block(torch.tensor([0, 1, -1, 1]), rank=4).mT.tolist()
    [[-1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, -1.0]]
    """
    place = _mix(position.to(torch.int64).unsqueeze(-2) + _signed(_GOLDEN * (seed + 1)))
    word = torch.arange(-(-rank // 64), device=position.device).unsqueeze(-1)
    hashed = _mix(place + word * _signed(_GOLDEN))
    bit = torch.arange(64, device=position.device).unsqueeze(-1)
    bits = ((hashed.unsqueeze(-2) >> bit) & 1).flatten(-3, -2)[..., :rank, :]
    return ((1 - 2 * bits) * (position >= 0).unsqueeze(-2)).to(dtype)


def sketch_of(
    rows: Float[Tensor, "*batch row key"], position: Int[Tensor, "*#batch row"], rank: int, seed: int
) -> SignSketch:
    """The sketch of some rows; those of further rows are added to it."""
    signs = sign_block(position, rank, seed, dtype=rows.dtype)
    return SignSketch(signs @ rows, signs.sum(-1), signs @ signs.mT)


def sketched_square(
    sketch: SignSketch,
    mass: Float[Tensor, "*batch key"],
    count: Int[Tensor, "*batch"],
    weights: Float[Tensor, "*batch key"],
    trace: Float[Tensor, "*batch"],
) -> SketchedSquare:
    """||S||_F^2 of the rows behind a sketch, with its standard error. See the head of this module.

    Args:
        sketch: of all the rows.
        mass: [..., key] column masses.
        count: [...] number of rows n.
        weights: [..., key] key weights, 1/mu; 0 for a key that is dropped.
        trace: [...] tr S, known exactly: sum_j q_j w_j with the column energies q.

    Returns:
        Estimates, not below (tr S)^2 / n, so that the participation ratio is not above 1. Exact for n <= 2 under the
        intrinsic measure, and for the copy map.

    >>> import torch
    >>> from attnprobe.functional.sketch import sketch_of, sketched_square
    >>> one, n = torch.ones(5), torch.tensor(5)
    >>> sketch = sketch_of(torch.eye(5), torch.arange(5), rank=16, seed=0)
    >>> [round(value.item(), 3) for value in sketched_square(sketch, one, n, one, torch.tensor(5.0))]
    [5.0, 0.0]
    """
    n = count.to(mass).clamp_min(1)
    # a unit trace keeps the eighth powers below in range; the square is scaled back at the end
    unit = safe_divide(weights, trace.unsqueeze(-1))
    column_mean = (mass / n.unsqueeze(-1)).unsqueeze(-2)
    # Pi P A, whether or not the rows sum to 1
    centred = torch.addcmul(sketch.sums, sketch.sign_sum.unsqueeze(-1), column_mean, value=-1)
    toward = mass * unit
    along = (centred @ toward.unsqueeze(-1)).squeeze(-1) / n.sqrt().unsqueeze(-1)  # Pi P K u
    known = (mass * toward).sum(-1) / n  # u^T K u
    others = (n - 1).clamp_min(1)
    mean = (safe_divide(trace, trace) - known) / others
    signs = sketch.sign_gram - sketch.sign_sum.unsqueeze(-1) * (sketch.sign_sum / n.unsqueeze(-1)).unsqueeze(-2)
    z = (centred * unit.unsqueeze(-2)) @ centred.mT - mean[..., None, None] * signs
    estimate = _off_diagonal(z, along)
    square = known.square() + mean.square() * others + estimate.square.clamp_min(0.0)
    return SketchedSquare(square * trace.square(), estimate.standard_error * trace.square())


def _off_diagonal(z: Float[Tensor, "*batch rank rank"], along: Float[Tensor, "*batch rank"]) -> SketchedSquare:
    """E Z_ab^2 + 2 E along_a^2 for independent rows a != b, where E Z_aa = 0 is known."""
    r = z.shape[-1]
    seen = z.diagonal(dim1=-2, dim2=-1)  # errors: their expectation is 0
    pairs = z.square()
    pairs = pairs - torch.diag_embed(pairs.diagonal(dim1=-2, dim2=-1))
    of_row = pairs.sum(-1)
    total = of_row.sum(-1, keepdim=True)
    beside = along.square()

    # everything once more without row a, for every a
    seen_without = _without(seen)
    square_without = (total - 2 * of_row) / ((r - 1) * (r - 2)) + 2 * _without(beside)
    slope = _slope_without(pairs, of_row, beside, seen, seen_without)
    estimate = total.squeeze(-1) / (r * (r - 1)) + 2 * beside.mean(-1) - (slope * seen).mean(-1)
    without = square_without - slope * seen_without
    jackknife = (without - without.mean(-1, keepdim=True)).square().sum(-1) * (r - 1) / r

    # The part of Z_ab^2 that no sum f(a) + f(b) explains. The jackknife has it twice.
    effect = (of_row - total / r) / (r - 2)
    residual = pairs - (total / (r * (r - 1)) + effect).unsqueeze(-1) - effect.unsqueeze(-2)
    residual = residual - torch.diag_embed(residual.diagonal(dim1=-2, dim2=-1))
    pairwise = 2 * residual.square().sum((-2, -1)) / (r * (r - 1) * r * (r - 3))
    by_row = (jackknife - pairwise * 2 * (r - 1) / (r - 2)).clamp_min(0.0)
    # The variance is itself estimated from r rows, whose terms have long tails: that of Student's t, r/2 degrees.
    return SketchedSquare(estimate, ((by_row + pairwise) * r / (r - 4)).sqrt())


def _slope_without(
    pairs: Float[Tensor, "*batch rank rank"],
    of_row: Float[Tensor, "*batch rank"],
    beside: Float[Tensor, "*batch rank"],
    seen: Float[Tensor, "*batch rank"],
    seen_without: Float[Tensor, "*batch rank"],
) -> Float[Tensor, "*batch rank"]:
    """Slope of what row b adds to the estimate against its seen error, over all b but a, for every a.

    Without row a, row b adds 2 (of_row_b - pairs_ab) / (r - 2) + 2 beside_b.
    """
    r = pairs.shape[-1]
    adds = 2 * of_row / (r - 2) + 2 * beside
    product = (adds * seen).sum(-1, keepdim=True) - adds.sum(-1, keepdim=True) * seen_without
    product = product - adds * (seen - seen_without)
    product = product - 2 / (r - 2) * ((pairs @ seen.unsqueeze(-1)).squeeze(-1) - of_row * seen_without)
    offset = seen - seen.mean(-1, keepdim=True)
    variation = offset.square().sum(-1, keepdim=True) - offset.square() * r / (r - 1)
    # errors that are rounding have no slope: the trace is 1, and slope times error stays at the size of rounding
    return product / variation.clamp_min(r * torch.finfo(seen.dtype).eps)


def _without(value: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch rank"]:
    """Mean over all rows but one, for every one."""
    return (value.sum(-1, keepdim=True) - value) / (value.shape[-1] - 1)


def ratio_of_square(
    trace: Float[Tensor, "*batch"], count: Int[Tensor, "*batch"], estimate: SketchedSquare, otherwise: float = 0.0
) -> SketchedRatio:
    """(tr S)^2 / (n ||S||_F^2) and, to first order, its standard error; `otherwise` where nothing is routed."""
    ratio = safe_divide(trace.square(), count * estimate.square, otherwise)
    return SketchedRatio(ratio, ratio * safe_divide(estimate.standard_error, estimate.square))


def sketched_ratio_of_rows(
    sketches: Iterable[SignSketch],
    mass: Float[Tensor, "*batch key"],
    energy: Float[Tensor, "*batch key"],
    rows: Float[Tensor, "*batch row key"],
    position: Int[Tensor, "*#batch row"],
    measure: Measure = "intrinsic",
) -> SketchedRatio:
    """Participation ratio of the prefix that ends at each of a few new rows, with its standard error: [..., row].

    Every prefix has other key weights, so each costs a product of the whole sketch: O(rank^2 n).

    Args:
        sketches: of each prefix, in order; only one is looked at at a time.
        mass, energy: column mass and column energy of the rows before these.
        rows: [..., row, key] the new rows, in order.
        position: 0-based position of each row, so that its prefix has position + 1 rows.
    """
    prefix_mass = mass.unsqueeze(-2) + rows.cumsum(-2)
    count = position + 1
    weights = prefix_key_weights(prefix_mass, count, measure)
    trace = ((energy.unsqueeze(-2) + rows.square().cumsum(-2)) * weights).sum(-1)
    ratios = []
    for i, sketch in enumerate(sketches):
        estimate = sketched_square(sketch, prefix_mass[..., i, :], count[..., i], weights[..., i, :], trace[..., i])
        ratios.append(ratio_of_square(trace[..., i], count[..., i], estimate))
    return SketchedRatio(*(torch.stack(parts, -1) for parts in zip(*ratios, strict=True)))


def sketched_participation_ratio(
    pattern: Float[Tensor, "*batch query key"],
    rank: int = 128,
    seed: int = 0,
    measure: Measure = "intrinsic",
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> SketchedRatio:
    """Participation ratio of the Token Difference Operator from `rank` random combinations of the rows.

        PR = (tr S)^2 / (n ||S||_F^2),      tr S exact, ||S||_F^2 estimated without bias

    The definition of what `TDO(method="sketch")` streams: O(rank n) memory a head. The relative error is about 2/rank
    for most heads. One pattern has the same signs, and so the same estimate, in every call with the same seed; errors
    of heads of one batch are correlated, since they share the signs.

    Args:
        pattern: [..., query, key], rows sum to 1.
        rank: number of sign rows, at least 16.
        seed: of the signs.
        measure: as in `participation_ratio`.
        rows, mask: as in `check_pattern`.

    Returns:
        `participation_ratio` [...], in (0, 1]; NaN where `participation_ratio` has NaN.
        `standard_error` [...] of it: one standard error covers the exact value about 68 times in 100, two 95 times.

    Raises:
        ValueError: rank below 16, a negative seed, not a pattern (`check_pattern`), or a measure that cannot be used
            with it.

    >>> import torch
    >>> from attnprobe.functional import sketched_participation_ratio
    >>> tuple(round(value.item(), 3) for value in sketched_participation_ratio(torch.eye(4)))
    (1.0, 0.0)

    Source: [SG] the participation ratio of the Token Difference Operator; the sketch is ours.
    """
    check_rank(rank, seed)
    checked = check_measured(pattern, measure, rows=rows, mask=mask)
    a = checked.pattern
    if isinstance(measure, Tensor):
        measure = key_weights(checked, measure).key  # in the order of the aligned columns
    position = torch.arange(a.shape[-2], device=a.device)
    sketch = sketch_of(a, torch.where(checked.real_rows, position, -1), rank, seed)
    mass = a.sum(-2)
    weights = prefix_key_weights(mass.unsqueeze(-2), checked.length.unsqueeze(-1), measure).squeeze(-2)
    trace = (a.square().sum(-2) * weights).sum(-1)
    estimate = sketched_square(sketch, mass, checked.length, weights, trace)
    return ratio_of_square(trace, checked.length, estimate, torch.nan)


def _mix(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The finaliser of splitmix64, on int64 that wraps."""
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Int[Tensor, "*shape"], by: int) -> Int[Tensor, "*shape"]:
    """Logical shift to the right: torch's carries the sign along."""
    return (x >> by) & (_MASK >> by)


def _signed(x: int) -> int:
    """The int64 with the same 64 bits."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
