"""Means over the rows of a pattern that have a value."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor


def mean_over_rows(
    value: Float[Tensor, "*batch query"], counted: Bool[Tensor, "*batch query"]
) -> Float[Tensor, "*batch"]:
    """Mean of the values of those rows that count; NaN where none does.

    Args:
        value: [..., query], anything at all in rows that do not count.
        counted: [..., query] which rows count; broadcast.

    >>> import torch
    >>> mean_over_rows(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([True, True, False])).item()
    2.0
    """
    return value.where(counted, 0.0).sum(-1) / counted.sum(-1)
