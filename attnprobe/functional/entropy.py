"""Spectral entropy of a head's output and its bounds from the routed part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnprobe.functional.patterns import check_pattern, safe_divide
from attnprobe.functional.routing import transport_values


class EntropyBound(NamedTuple):
    """Spectral entropies in nats, each of shape [...]: lower <= entropy <= upper.

    Attributes:
        entropy: H(Z) of the output Z = Omega_pi^1/2 A V.
        centered_entropy: H(Z_c) of its routed part.
        lower: alpha H(Z_c).
        upper: h2(alpha) + alpha H(Z_c).
        routed_fraction: alpha, routed / (mean + routed) energy.
    """

    entropy: Float[Tensor, "*batch"]
    centered_entropy: Float[Tensor, "*batch"]
    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]
    routed_fraction: Float[Tensor, "*batch"]


def spectral_entropy(singular_values_squared: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """Entropy of the energy distribution over singular directions.

        H = -sum_k p_k log p_k,     p_k = sigma_k^2 / sum sigma^2

    Args:
        singular_values_squared: [..., k], in any order.

    Returns:
        [...] nats, in [0, log k]; 0 where there is no energy.

    Raises:
        ValueError: a negative or non-finite entry.

    >>> import torch
    >>> from attnprobe.functional import spectral_entropy
    >>> round(spectral_entropy(torch.tensor([1.0, 1.0, 0.0])).item(), 4)
    0.6931

    Source: [SG] spectral entropy.
    """
    if not (singular_values_squared.isfinite() & (singular_values_squared >= 0)).all():
        raise ValueError("squared singular values must be finite and not negative.")
    return _entropy(singular_values_squared)


def entropy_bound(
    pattern: Float[Tensor, "*batch query key"],
    values: Float[Tensor, "*batch key d"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> EntropyBound:
    """Spectral entropy of a head's output, and the bounds that the routed part sets.

        alpha H(Z_c) <= H(Z) <= h2(alpha) + alpha H(Z_c),       Z = Omega_pi^1/2 A V, pi = 1/n

    h2 is the binary entropy, alpha the routed fraction of `routing_split`.

    Args:
        pattern: [..., query, key], rows sum to 1; rectangular patterns are fine.
        values: [..., key, d], leading dimensions broadcast to the pattern's; repeat shared key/value heads
            first.
        rows, mask: as in `check_pattern`; the key of `rows="sink"` has value 0.

    Returns:
        `EntropyBound`, in nats; computed in float64.

    Raises:
        ValueError: not a pattern (`check_pattern`), or values that do not fit it or are not finite.

    >>> import torch
    >>> from attnprobe.functional import entropy_bound
    >>> bound = entropy_bound(torch.eye(2), torch.eye(2))
    >>> round(bound.entropy.item(), 4), round(bound.upper.item(), 4), bound.lower.item() < 1e-9
    (0.6931, 0.6931, True)

    Source: [SG] the bound on spectral entropy.
    """
    checked = check_pattern(pattern, rows=rows, mask=mask)
    parts = transport_values(checked, values)
    covariance = parts.centered.mT @ parts.centered / checked.length[..., None, None]
    bound = entropy_from_moments(parts.mean, covariance)
    return EntropyBound(*(field.to(checked.dtype) for field in bound))


def entropy_from_moments(mean: Float[Tensor, "*batch d"], covariance: Float[Tensor, "*batch d d"]) -> EntropyBound:
    """The entropy bound from moments of the rows z of A V, which can be accumulated row by row.

        Z_c^T Z_c = C = (1/n) sum_i (z_i - m)(z_i - m)^T,       Z^T Z = C + m m^T

    Args:
        mean: [..., d] mean of z.
        covariance: [..., d, d] C, divided by n and not by n - 1.

    Returns:
        `EntropyBound` in nats, in the dtype of the arguments; eigenvalues are taken in float64. A spread that is
        rounding beside the mean (8 eps of the energy) counts as none. Nothing is checked.

    >>> import torch
    >>> from attnprobe.functional import entropy_from_moments
    >>> round(entropy_from_moments(torch.zeros(2), torch.eye(2)).entropy.item(), 4)
    0.6931

    Source: [SG] the bound on spectral entropy, in streaming form.
    """
    center, spread = mean.double(), covariance.double()
    energy = spread.diagonal(dim1=-2, dim2=-1).sum(-1) + center.square().sum(-1)
    rounding = 8 * torch.finfo(covariance.dtype).eps * energy
    noise = spread.diagonal(dim1=-2, dim2=-1).sum(-1) < rounding
    spread = spread.where(~noise[..., None, None], 0.0)
    second = spread + center.unsqueeze(-1) * center.unsqueeze(-2)
    entropy = _entropy(torch.linalg.eigvalsh(second).clamp_min(0.0))
    centered = _entropy(torch.linalg.eigvalsh(spread).clamp_min(0.0))
    routed = spread.diagonal(dim1=-2, dim2=-1).sum(-1)
    alpha = safe_divide(routed, routed + center.square().sum(-1))
    lower = alpha * centered
    upper = lower - torch.xlogy(alpha, alpha) - torch.xlogy(1 - alpha, 1 - alpha)
    fields = (entropy, centered, lower, upper, alpha)
    return EntropyBound(*(field.to(covariance.dtype) for field in fields))


def _entropy(energy: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    share = safe_divide(energy, energy.sum(-1, keepdim=True))
    # Adding 0 turns the -0 of a single direction into 0.
    return -torch.xlogy(share, share).sum(-1) + 0.0
