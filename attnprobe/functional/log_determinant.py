"""The determinant of a causal pattern: the product of what tokens give to themselves."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnprobe.functional.patterns import check_pattern


def attention_log_determinant(
    pattern: Float[Tensor, "*batch query key"],
    epsilon: float = 0.0,
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    """log det A of a causal pattern, nats.

        log det A = sum_i log A_ii

    A causal pattern is triangular, so its eigenvalues stand on its diagonal. Divided by n this is the logarithm of the
    geometric mean of the self-attention weights.

    Args:
        pattern: [..., n, n] causal, rows sum to 1.
        epsilon: added to every weight, so that a weight of 0 gives log(epsilon). With 0 (default) it gives -inf.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused.

    Returns:
        [...] at most n log(1 + epsilon), summed in float64 (on devices that have it).

    Raises:
        ValueError: a negative epsilon, or not a causal square pattern (`check_pattern`).

    >>> import torch
    >>> from attnprobe.functional import attention_log_determinant
    >>> pattern = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> round(attention_log_determinant(pattern).exp().item(), 4)
    0.5
    >>> attention_log_determinant(torch.tensor([[1.0, 0.0], [1.0, 0.0]])).item()
    -inf

    Source: LLM-Check, NeurIPS 2024 (attention score); [LE] (attention log-determinant).
    """
    check_epsilon(epsilon)
    checked = check_pattern(
        pattern,
        rows=rows,
        mask=mask,
        square=True,
        causal=True,
        why="A_ii is what a token gives to itself",
    )
    logs = log_weights(checked.pattern.diagonal(dim1=-2, dim2=-1), checked.real_rows, epsilon)
    return logs.sum(-1).to(checked.dtype)


def check_epsilon(epsilon: float) -> None:
    """Raise unless a logarithm can be taken of a weight plus this.

    Raises:
        ValueError: negative, infinite or NaN.
    """
    if not 0.0 <= epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon!r} is added to weights: use 0 or a small positive number.")


def log_weights(weight: Float[Tensor, "*axes"], real: Bool[Tensor, "*axes"], epsilon: float) -> Float[Tensor, "*axes"]:
    """log(weight + epsilon), and 0 where there is no token; float64 where the device has that.

    >>> import torch
    >>> log_weights(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([True, True, False]), 0.0).tolist()
    [0.0, -inf, 0.0]
    """
    wide = weight.dtype if weight.device.type == "mps" else torch.float64  # mps has no float64
    return torch.where(real, (weight.to(wide) + epsilon).log(), 0.0)
