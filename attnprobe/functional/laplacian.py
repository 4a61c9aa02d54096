"""Eigenvalues of the attention Laplacian, which for a causal pattern stand on its diagonal, and their mean."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnprobe.functional.patterns import check_pattern

CLIPS = ("each", "mean")


def laplacian_eigenvalues(
    pattern: Float[Tensor, "*batch query key"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch key"]:
    """Eigenvalues of the Laplacian of a causal pattern, one for every token.

        L_ii = (sum_{u >= i} a_ui) / (n - i) - a_ii         (i = 0..n-1)

    The Laplacian of a triangular pattern is triangular, so these are its eigenvalues.

    Args:
        pattern: [..., n, n] causal, rows sum to 1.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused.

    Returns:
        [..., n] in position order, each in [-1, 1]; NaN past the end of a masked sequence. The features of
        the source are these, sorted in descending order, the first k.

    Raises:
        ValueError: not a causal square pattern (`check_pattern`).

    >>> import torch
    >>> from attnprobe.functional import laplacian_eigenvalues
    >>> laplacian_eigenvalues(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [-0.25, 0.0]

    Source: [LE] the definition of the Laplacian.
    """
    checked = check_pattern(
        pattern,
        rows=rows,
        mask=mask,
        square=True,
        causal=True,
        why="token i is both the query and the key of L_ii",
    )
    weights = checked.pattern
    return eigenvalues_from_columns(weights.sum(-2), weights.diagonal(dim1=-2, dim2=-1), checked.length)


def mean_laplacian_eigenvalue(
    pattern: Float[Tensor, "*batch query key"],
    clip: str = "each",
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Mean of the Laplacian eigenvalues of a causal pattern, clipped to [0, 1].

        (1/n) sum_i min(max(L_ii, 0), 1)        ("each")
        min(max((1/n) sum_i L_ii, 0), 1)        ("mean")

    A token that gives itself more than later tokens give it has L_ii < 0. Clipped one by one, such tokens count as 0
    and cannot cancel what the others receive.

    Args:
        pattern: [..., n, n] causal, rows sum to 1.
        clip: "each" (default): every eigenvalue is clipped; "mean": their mean is.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused.

    Returns:
        [...] in [0, 1].

    Raises:
        ValueError: an unknown clip, or not a causal square pattern (`check_pattern`).

    >>> import torch
    >>> from attnprobe.functional import mean_laplacian_eigenvalue
    >>> shift = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> round(mean_laplacian_eigenvalue(shift).item(), 4)
    0.1667

    Source: [LE] the Laplacian; [SG] its mean as the routing signal of LapEigValRAUQ. How it is clipped is our reading.
    """
    check_clip(clip)
    checked = check_pattern(
        pattern,
        rows=rows,
        mask=mask,
        square=True,
        causal=True,
        why="token i is both the query and the key of L_ii",
    )
    weights = checked.pattern
    return mean_from_columns(weights.sum(-2), weights.diagonal(dim1=-2, dim2=-1), checked.length, clip)


def check_clip(clip: str) -> None:
    """Raise unless `clip` says what is clipped.

    Raises:
        ValueError: it does not.
    """
    if clip not in CLIPS:
        raise ValueError(f"unknown clip {clip!r}: use {' or '.join(map(repr, CLIPS))}.")


def eigenvalues_from_columns(
    mass: Float[Tensor, "*batch key"], own: Float[Tensor, "*batch key"], length: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch key"]:
    """The eigenvalues from what every token has received of `length` rows, and what it gave to itself.

    Args:
        mass: [..., key] column sums; own: [..., key] diagonal entries; both are broadcast.
        length: [...] number of rows.

    Returns:
        [..., key], NaN from `length` on.

    >>> import torch
    >>> eigenvalues_from_columns(torch.tensor([1.5, 0.5]), torch.tensor([1.0, 0.5]), torch.tensor(2)).tolist()
    [-0.25, 0.0]
    """
    key = torch.arange(mass.shape[-1], device=mass.device)
    size = length.unsqueeze(-1)
    eigenvalues = mass / (size - key).clamp_min(1) - own
    return eigenvalues.where(key < size, torch.nan)


def mean_from_columns(
    mass: Float[Tensor, "*batch key"], own: Float[Tensor, "*batch key"], length: Int[Tensor, "*batch"], clip: str
) -> Float[Tensor, "*batch"]:
    """`mean_laplacian_eigenvalue` from the sums of `eigenvalues_from_columns`; NaN of no rows.

    >>> import torch
    >>> mean_from_columns(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor(2), "each").item()
    0.0
    """
    eigenvalues = eigenvalues_from_columns(mass, own, length)
    if clip == "each":
        eigenvalues = eigenvalues.clamp(0.0, 1.0)
    inside = torch.arange(mass.shape[-1], device=mass.device) < length.unsqueeze(-1)
    mean = eigenvalues.where(inside, 0.0).sum(-1) / length
    return mean if clip == "each" else mean.clamp(0.0, 1.0)
