"""What a head's output is made of: the mean that every row shares, and what is routed on top of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnprobe.functional.patterns import CheckedPattern, check_pattern, safe_divide
from attnprobe.functional.tdo import half_operator, spectrum_of_half


class RoutingSplit(NamedTuple):
    """Energies of the mean and the routed part of A V, each of shape [...].

    Attributes:
        mean_energy: ||m||^2.
        routed_energy: ||A V_c||^2 in L2(pi).
        routed_fraction: routed / (mean + routed), in [0, 1].
        value_energy: ||V_c||^2 in L2(mu).
        gain: sqrt(routed / value), what attention keeps of the spread of the values.
        bound: sqrt(lambda_2), which the gain cannot exceed.
    """

    mean_energy: Float[Tensor, "*batch"]
    routed_energy: Float[Tensor, "*batch"]
    routed_fraction: Float[Tensor, "*batch"]
    value_energy: Float[Tensor, "*batch"]
    gain: Float[Tensor, "*batch"]
    bound: Float[Tensor, "*batch"]


class TransportedValues(NamedTuple):
    """A V in two parts, float64: z_i = mean + centered_i."""

    mean: Float[Tensor, "*batch d"]
    centered: Float[Tensor, "*batch query d"]
    value_second_moment: Float[Tensor, "*batch"]


def routing_split(
    pattern: Float[Tensor, "*batch query key"],
    values: Float[Tensor, "*batch key d"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> RoutingSplit:
    """Split the output of a head into a mean and a routed part, under the intrinsic measure.

        A V = 1 m + A V_c,   m = mu^T V,   V_c = V - 1 m,   mu = c / n
        ||A V_c||^2_{pi,F} <= lambda_2 ||V_c||^2_{mu,F}

    The two parts are orthogonal in L2(pi), pi = 1/n.

    Args:
        pattern: [..., query, key], rows sum to 1; rectangular patterns are fine.
        values: [..., key, d], leading dimensions broadcast to the pattern's; repeat shared key/value heads
            first.
        rows, mask: as in `check_pattern`; the key of `rows="sink"` has value 0.

    Returns:
        `RoutingSplit`; energies in squared units of the values, the rest fractions. With no energy at all the
        routed fraction is 0, and where the values do not differ the gain is 0.

    Raises:
        ValueError: not a pattern (`check_pattern`), or values that do not fit it or are not finite.

    >>> import torch
    >>> from attnprobe.functional import routing_split
    >>> split = routing_split(torch.eye(2), torch.tensor([[3.0], [1.0]]))
    >>> split.mean_energy.item(), split.routed_energy.item(), split.gain.item()
    (4.0, 1.0, 1.0)

    Source: [SG] the mean-routing decomposition.
    """
    checked = check_pattern(pattern, rows=rows, mask=mask)
    parts = transport_values(checked, values)
    routed = parts.centered.square().sum((-2, -1)) / checked.length
    spectrum = spectrum_of_half(half_operator(checked, "intrinsic"))
    lambda2 = spectrum[..., 1] if spectrum.shape[-1] > 1 else torch.zeros_like(routed)
    split = split_from_moments(parts.mean, routed, parts.value_second_moment, lambda2)
    return RoutingSplit(*(field.to(checked.dtype) for field in split))


def split_from_moments(
    mean: Float[Tensor, "*batch d"],
    routed_energy: Float[Tensor, "*batch"],
    value_second_moment: Float[Tensor, "*batch"],
    lambda2: Float[Tensor, "*batch"],
) -> RoutingSplit:
    """The routing split from moments that can be accumulated row by row.

        ||V_c||^2_{mu,F} = sum_j mu_j ||v_j||^2 - ||m||^2

    Args:
        mean: [..., d] mean of the rows z of A V, which is m.
        routed_energy: [...] mean of ||z - m||^2.
        value_second_moment: [...] sum_j mu_j ||v_j||^2, with the mu of the mean: rows that sum to 1 only
            nearly leave their excess times ||m||^2 in the value energy, unless both are divided by its sum.
        lambda2: [...] second eigenvalue of the intrinsic TDO (NaN if it is not known: the bound is then NaN).

    Returns:
        `RoutingSplit` in the dtype of the arguments. A spread of the values below the rounding of their
        second moment is taken for 0. Nothing is checked.

    >>> import torch
    >>> from attnprobe.functional import split_from_moments
    >>> one = torch.tensor(1.0)
    >>> split_from_moments(torch.tensor([2.0]), one, torch.tensor(5.0), one).gain.item()
    1.0

    Source: [SG] the mean-routing decomposition, in streaming form.
    """
    mean_energy = mean.square().sum(-1)
    value_energy = (value_second_moment - mean_energy).clamp_min(0.0)
    rounding = 8 * torch.finfo(value_energy.dtype).eps * value_second_moment
    spread = value_energy.where(value_energy > rounding, 0.0)
    return RoutingSplit(
        mean_energy=mean_energy,
        routed_energy=routed_energy,
        routed_fraction=safe_divide(routed_energy, mean_energy + routed_energy),
        value_energy=value_energy,
        gain=safe_divide(routed_energy, spread).sqrt(),
        bound=lambda2.clamp_min(0.0).sqrt(),
    )


def transport_values(checked: CheckedPattern, values: Float[Tensor, "*batch key d"]) -> TransportedValues:
    """m, A V_c and sum_j mu_j ||v_j||^2 of a checked pattern, in float64; padded rows of A V_c are 0."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"values must be a floating-point tensor [..., key, d], not {kind}.")
    if values.ndim < 2:
        raise ValueError(f"values must have shape [..., key, d], but their shape is {tuple(values.shape)}.")
    aligned = checked.align_keys(values, "values").double()
    if not aligned.isfinite().all():
        raise ValueError("values have a NaN or infinite entry at a real key.")
    weights = checked.pattern.double()
    # mu must sum to 1 more exactly than rows of a low precision do: their excess times ||m||^2 would pass for
    # a spread of the values.
    mass = weights.sum(-2) / weights.sum((-2, -1)).unsqueeze(-1)
    mean = (mass.unsqueeze(-2) @ aligned).squeeze(-2)
    second = (mass * aligned.square().sum(-1)).sum(-1)
    # A (V - 1 m) and not A V - 1 m: it does not cancel when the mean is large.
    return TransportedValues(mean, weights @ (aligned - mean.unsqueeze(-2)), second)
