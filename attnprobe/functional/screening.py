"""Choosing one head of many by a value."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def first_largest(values: Float[Tensor, "*batch head"], tolerance: float) -> Int[Tensor, "*batch"]:
    """The lowest head whose value is the largest but for rounding.

    Args:
        values: [..., head]; NaN is no candidate.
        tolerance: relative; values within it of the largest are a tie.

    >>> import torch
    >>> first_largest(torch.tensor([0.2, 0.5, 0.5 + 1e-12]), 1e-9).item()
    1
    """
    values = values.nan_to_num(nan=-float("inf"), neginf=-float("inf"))
    largest = values.amax(-1, keepdim=True)
    return (values >= largest - tolerance * largest.abs()).to(values.dtype).argmax(-1)
