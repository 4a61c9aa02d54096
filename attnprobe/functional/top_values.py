"""The largest of many values, in order: how features of a fixed number are made of one value a token."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def top_values(values: Float[Tensor, "*batch key"], k: int) -> Float[Tensor, "*batch k"]:
    """The k largest values, descending; NaN is no value and comes last.

    Args:
        values: [..., key], such as `laplacian_eigenvalues`.
        k: how many.

    Returns:
        [..., k], NaN where there are fewer than k values.

    Raises:
        ValueError: k is no whole number of at least 1.

    >>> import torch
    >>> top_values(torch.tensor([0.25, torch.nan, 0.5, -1.0]), 2).tolist()
    [0.5, 0.25]
    >>> top_values(torch.tensor([0.25, torch.nan]), 2).tolist()
    [0.25, nan]

    Source: [LE] arXiv 2502.17598 (the largest eigenvalues of every head, concatenated).
    """
    check_top(k)
    some = values.shape[-1] - values.isnan().sum(-1, keepdim=True)
    ordered = values.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(-1, descending=True).values
    ordered = torch.nn.functional.pad(ordered, (0, max(0, k - ordered.shape[-1])))[..., :k]
    return ordered.where(torch.arange(k, device=values.device) < some, torch.nan)


def check_top(k: int) -> None:
    """Raise unless `k` says how many.

    Raises:
        ValueError: it does not.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k={k!r}: use a whole number of at least 1.")
