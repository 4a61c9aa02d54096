"""The Token Difference Operator of an attention pattern and its spectrum.

With weights pi on queries and mu on keys, D = Omega_mu^-1 A^T Omega_pi A is self-adjoint and positive in
L2(mu); it has the spectrum of the symmetric S = H^T H with the half operator H = Omega_pi^1/2 A
Omega_mu^-1/2.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from attnprobe.functional.measures import Measure, check_measured, key_weights
from attnprobe.functional.patterns import CheckedPattern, inverse_root


def half_operator(checked: CheckedPattern, measure: Measure) -> Float[Tensor, "*batch query key"]:
    """H = Omega_pi^1/2 A Omega_mu^-1/2, so that S = H^T H; keys with mu = 0 give zero columns."""
    weights = key_weights(checked, measure)
    return checked.pattern * weights.query.sqrt()[..., None, None] * inverse_root(weights.key).unsqueeze(-2)


def intrinsic_pair(
    mass: Float[Tensor, "*batch key"],
) -> tuple[Float[Tensor, "*batch key"], Float[Tensor, "*batch key"]]:
    """What the intrinsic S is made by, and what is known of it, from column masses c.

    Returns:
        1/sqrt(c), with which G = A^T A gives S (0 for a key without mass, or whose mass has underflowed), and sqrt(c)
        of length 1, the eigenvector of the first eigenvalue 1.
    """
    tiny = torch.finfo(mass.dtype).tiny
    inside = mass >= tiny
    known = torch.where(inside, mass, 0.0).sqrt()
    scale = torch.where(inside, mass.clamp_min(tiny).rsqrt(), 0.0)
    return scale, known / known.norm(dim=-1, keepdim=True).clamp_min(tiny)


def smaller_gram(half: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch side side"]:
    """H^T H or H H^T, whichever is smaller: both have the nonzero spectrum of S."""
    return half @ half.mT if half.shape[-2] < half.shape[-1] else half.mT @ half


def spectrum_of_half(half: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch key"]:
    """All n_key eigenvalues of S = H^T H, descending, not below 0, float64."""
    eigenvalues = torch.linalg.eigvalsh(smaller_gram(half.double())).flip(-1).clamp_min(0.0)
    return pad(eigenvalues, (0, half.shape[-1] - eigenvalues.shape[-1]))


def tdo_matrix(
    pattern: Float[Tensor, "*batch query key"],
    measure: Measure = "intrinsic",
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch key key"]:
    """The Token Difference Operator in its symmetric form.

        S = Omega_mu^-1/2 A^T Omega_pi A Omega_mu^-1/2

    D = Omega_mu^-1/2 S Omega_mu^1/2 has the same eigenvalues. Keys with mu = 0 are dropped: zero rows and
    columns.

    Args:
        pattern: [..., query, key], rows sum to 1.
        measure: `"intrinsic"`, `"counting"`, `"positional"` (causal square patterns), or [..., key] key
            weights.
        rows, mask: as in `check_pattern`; with a mask the real tokens come first, then zeros, and with
            `rows="sink"` the sink is key 0.

    Returns:
        [..., key, key], symmetric and positive semi-definite.

    Raises:
        ValueError: not a pattern (`check_pattern`), or a measure that cannot be used with it.

    >>> import torch
    >>> from attnprobe.functional import tdo_matrix
    >>> tdo_matrix(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), "counting").tolist()
    [[1.25, 0.25], [0.25, 0.25]]

    Source: [SG] the definition of the operator.
    """
    half = half_operator(check_measured(pattern, measure, rows=rows, mask=mask), measure)
    return half.mT @ half


def participation_ratio(
    pattern: Float[Tensor, "*batch query key"],
    measure: Measure = "intrinsic",
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Participation ratio of the Token Difference Operator: the share of directions a head keeps apart.

        PR = (tr S)^2 / (n ||S||_F^2),      n = number of rows

    1 for the copy map, 1/n when every token attends to the same one; for hard attention the number of
    distinct keys attended, over n. No eigenvalues are computed.

    Args:
        pattern: [..., query, key], rows sum to 1. For a rectangular pattern n stays the number of rows (our
            reading).
        measure: `"intrinsic"`, `"counting"`, `"positional"` (causal square patterns), or [..., key] key
            weights.
        rows, mask: as in `check_pattern`.

    Returns:
        [...], a fraction in (0, 1]; NaN if a given measure has weight 0 on every key that is attended to.

    Raises:
        ValueError: not a pattern (`check_pattern`), or a measure that cannot be used with it.

    >>> import torch
    >>> from attnprobe.functional import participation_ratio
    >>> sink = torch.zeros(4, 4)
    >>> sink[:, 0] = 1.0
    >>> participation_ratio(torch.stack([torch.eye(4), sink])).tolist()
    [1.0, 0.25]

    Source: [SG] the participation ratio of the Token Difference Operator.
    """
    checked = check_measured(pattern, measure, rows=rows, mask=mask)
    half = half_operator(checked, measure)
    # PR does not see the scale of H, and a unit trace keeps the fourth powers below far from overflow.
    half = half / half.square().sum((-2, -1), keepdim=True).sqrt()
    concentration = smaller_gram(half).square().sum((-2, -1))
    return (checked.length * concentration).reciprocal().clamp(max=1.0)


def tdo_spectrum(
    pattern: Float[Tensor, "*batch query key"],
    k: int | None = None,
    measure: Measure = "intrinsic",
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch k"]:
    """The largest eigenvalues of the Token Difference Operator.

        D = Omega_mu^-1 A^T Omega_pi A

    Under the intrinsic measure they lie in [0, 1] and the first is 1, with the constant function as
    eigenvector.

    Args:
        pattern: [..., query, key], rows sum to 1.
        k: how many; all n_key of them by default.
        measure: `"intrinsic"`, `"counting"`, `"positional"` (causal square patterns), or [..., key] key
            weights.
        rows, mask: as in `check_pattern`; dropped and padded keys count as eigenvalue 0, at the end.

    Returns:
        [..., k], descending, never negative; computed in float64.

    Raises:
        ValueError: k outside 1..n_key, not a pattern (`check_pattern`), or a measure that cannot be used with
            it.

    >>> import torch
    >>> from attnprobe.functional import tdo_spectrum
    >>> [round(value, 6) for value in tdo_spectrum(torch.eye(3), k=2).tolist()]
    [1.0, 1.0]

    Source: [SG] the spectrum of the operator; its appendix uses k = 16 as features.
    """
    checked = check_measured(pattern, measure, rows=rows, mask=mask)
    n_key = checked.pattern.shape[-1]
    if k is not None and not 1 <= k <= n_key:
        raise ValueError(f"k must lie in 1..{n_key}, the number of keys, but it is {k}.")
    spectrum = spectrum_of_half(half_operator(checked, measure))
    return spectrum[..., :k].to(checked.dtype)
