"""Direction of transport: how far a pattern is from its own transpose, and whether the flow has a potential.

Singular values cannot tell A from A^T; these numbers can.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnprobe.functional.patterns import check_pattern, safe_divide
from attnprobe.functional.transport import normalized_operator

OPERATORS = ("pattern", "normalized")

_TRANSPOSE = "direction compares A with its transpose, which needs queries and keys that are the same tokens"


class HodgeSplit(NamedTuple):
    """Asymmetry and its two parts, each [...]: asymmetry^2 = gradient^2 + curl^2.

    Attributes:
        asymmetry: ||R||_F / ||A||_F with R = (A - A^T)/2.
        gradient: the part that follows a potential (mass moves from some tokens to others).
        curl: the part that circulates.
    """

    asymmetry: Float[Tensor, "*batch"]
    gradient: Float[Tensor, "*batch"]
    curl: Float[Tensor, "*batch"]


def asymmetry(
    pattern: Float[Tensor, "*batch query key"],
    operator: str = "pattern",
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    """How directed a self-attention pattern is.

        G(X) = ||(X - X^T)/2||_F / ||X||_F

    0 for a symmetric X, 1 for an antisymmetric one. A causal mask bounds G by 1/sqrt(2) and largely sets it,
    so compare heads under the same mask and length.

    Args:
        pattern: [..., n, n], rows sum to 1.
        operator: `"pattern"` takes X = A, `"normalized"` takes X = D_Q^-1/2 A D_K^-1/2.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused.

    Returns:
        [...], a fraction in [0, 1].

    Raises:
        ValueError: an unknown operator, or not a square pattern (`check_pattern`).

    >>> import torch
    >>> from attnprobe.functional import asymmetry
    >>> asymmetry(torch.eye(3)).item()
    0.0

    Source: [ST] the asymmetry coefficient.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator {operator!r} is unknown; use {' or '.join(map(repr, OPERATORS))}.")
    checked = check_pattern(pattern, rows=rows, mask=mask, square=True, why=_TRANSPOSE)
    weights = checked.pattern.double()
    x = weights if operator == "pattern" else normalized_operator(weights)
    difference = torch.linalg.matrix_norm(x - x.mT) / 2
    return (difference / torch.linalg.matrix_norm(x)).to(checked.dtype)


def hodge_split(
    pattern: Float[Tensor, "*batch query key"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> HodgeSplit:
    """Split the asymmetry of a self-attention pattern into a gradient and a curl.

        R = (A - A^T)/2,  r = R 1
        asymmetry^2 = ||R||_F^2 / ||A||_F^2 = gradient^2 + curl^2,      gradient^2 = 2 ||r||^2 / (n ||A||_F^2)

    Args:
        pattern: [..., n, n], rows sum to 1.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused.

    Returns:
        `HodgeSplit`, fractions in [0, 1].

    Raises:
        ValueError: not a square pattern (`check_pattern`).

    >>> import torch
    >>> from attnprobe.functional import hodge_split
    >>> cycle = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    >>> hodge_split(cycle).gradient.item()
    0.0

    Source: [ST] the Hodge decomposition of the antisymmetric part.
    """
    checked = check_pattern(pattern, rows=rows, mask=mask, square=True, why=_TRANSPOSE)
    weights = checked.pattern.double()
    antisymmetric = (weights - weights.mT) / 2
    split = _split(
        weights.square().sum((-2, -1)),
        antisymmetric.square().sum((-2, -1)),
        antisymmetric.sum(-1).square().sum(-1),
        checked.length,
    )
    return HodgeSplit(*(field.to(checked.dtype) for field in split))


def hodge_from_columns(
    column_mass: Float[Tensor, "*batch key"],
    frobenius_squared: Float[Tensor, "*batch"],
    diagonal_squared: Float[Tensor, "*batch"],
    length: Int[Tensor, "*batch"] | None = None,
) -> HodgeSplit:
    """The Hodge split of a causal pattern from sums that can be accumulated row by row.

        ||R||_F^2 = (||A||_F^2 - sum_i d_i^2)/2,        r = (1 - c)/2

    Args:
        column_mass: [..., key] sums of the columns, c.
        frobenius_squared: [...] sum of all squared entries (the sum of the column energies).
        diagonal_squared: [...] sum of d_i^2 over the diagonal.
        length: [...] number of rows; the number of keys by default. Keys past it are ignored.

    Returns:
        `HodgeSplit`, in the dtype of the column masses. Nothing is checked.

    >>> import torch
    >>> from attnprobe.functional import hodge_from_columns
    >>> hodge_from_columns(torch.ones(3), torch.tensor(3.0), torch.tensor(3.0)).asymmetry.item()
    0.0

    Source: [ST] the Hodge decomposition; the causal shortcut follows from unit row sums.
    """
    n = column_mass.shape[-1]
    if length is None:
        length = torch.full(column_mass.shape[:-1], n, device=column_mass.device)
    real = torch.arange(n, device=length.device) < length.unsqueeze(-1)
    divergence = ((1 - column_mass.double()) / 2).where(real, 0.0)
    energy = frobenius_squared.double()
    skew = ((energy - diagonal_squared.double()) / 2).clamp_min(0.0)
    split = _split(energy, skew, divergence.square().sum(-1), length)
    return HodgeSplit(*(field.to(column_mass.dtype) for field in split))


def _split(energy: Tensor, skew: Tensor, divergence: Tensor, length: Tensor) -> HodgeSplit:
    """The split from ||A||_F^2, ||R||_F^2 and ||r||^2."""
    total = safe_divide(skew, energy)
    gradient = safe_divide(2 * divergence / length, energy)
    return HodgeSplit(total.sqrt(), gradient.sqrt(), (total - gradient).clamp_min(0.0).sqrt())
