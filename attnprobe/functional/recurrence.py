"""The recurrent confidence behind SAUQ and RAUQ, in log space."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

# Softmax outputs and ratios may end a rounding error above 1.
ABOVE_ONE = 1e-6


def recurrent_confidence(
    probability: Float[Tensor, "*batch step"],
    signal: Float[Tensor, "*batch step"],
    alpha: float = 0.2,
) -> Float[Tensor, "*batch step"]:
    """Confidence that each step inherits from the one before, as far as attention carries it over.

        c_1 = p_1,      c_t = alpha p_t + (1 - alpha) s_t c_{t-1}

    Args:
        probability: [..., T] probability of each generated token.
        signal: [..., T] routing signal in [0, 1]; signal[..., 0] is not used and may be NaN. Leading
            dimensions are broadcast against those of `probability`.
        alpha: weight of the token's own probability.

    Returns:
        [..., T] in [0, 1], 0 where p_t is 0 and nothing is carried over. Where confidences can leave the
        range of the dtype, use `recurrent_log_confidence`.

    Raises:
        TypeError: not floating-point tensors.
        ValueError: alpha outside [0, 1], no step, different numbers of steps, or a NaN or a value outside [0,
            1].

    >>> import torch
    >>> from attnprobe.functional import recurrent_confidence
    >>> c = recurrent_confidence(torch.tensor([0.5, 1.0]), torch.tensor([float("nan"), 0.5]), alpha=0.5)
    >>> [round(value, 4) for value in c.tolist()]
    [0.5, 0.625]

    Source: RAUQ (2505.20045), the recurrent confidence score; [SG] with the participation ratio as signal.
    """
    _check_floating(probability, "probability")
    if not ((probability >= 0) & (probability <= 1 + ABOVE_ONE)).all():
        raise ValueError("probability must lie in [0, 1] at every step, without NaN.")
    dtype = torch.promote_types(probability.dtype, torch.float32)
    # The logarithm of a float32 probability is taken in float64: c must not be off by the rounding of log c.
    return recurrent_log_confidence(probability.double().log(), signal, alpha).exp().to(dtype)


def recurrent_log_confidence(
    log_probability: Float[Tensor, "*batch step"],
    signal: Float[Tensor, "*batch step"],
    alpha: float = 0.2,
) -> Float[Tensor, "*batch step"]:
    """log c_t of `recurrent_confidence`, finite however small the probabilities are.

        log c_t = logaddexp(log alpha + log p_t, log(1 - alpha) + log s_t + log c_{t-1})

    Args:
        log_probability: [..., T] log p_t in nats. It may be above 0: RAUQ with entropy puts log|V| - H_t in
            place of p_t.
        signal: [..., T] routing signal in [0, 1]; signal[..., 0] is not used and may be NaN.
        alpha: weight of the token's own probability.

    Returns:
        [..., T] nats, in float32 or float64; -inf only where log p_t is -inf (or alpha 0) and nothing is
        carried over.

    Raises:
        TypeError: not floating-point tensors.
        ValueError: alpha outside [0, 1], no step, different numbers of steps, NaN, or a signal outside [0,
            1].

    >>> import torch
    >>> from attnprobe.functional import recurrent_log_confidence
    >>> log_p = torch.full((2,), -1000.0, dtype=torch.float64)
    >>> recurrent_log_confidence(log_p, torch.ones(2, dtype=torch.float64)).tolist()
    [-1000.0, -1000.0]

    Source: RAUQ (2505.20045), the recurrent confidence score.
    """
    _check_floating(log_probability, "log_probability")
    _check_floating(signal, "signal")
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], but it is {alpha}.")
    steps = log_probability.shape[-1]
    if signal.shape[-1] != steps:
        raise ValueError(
            f"probability and signal must have the same number of steps, but they have {steps} and {signal.shape[-1]}."
        )
    try:
        own, carried = torch.broadcast_tensors(log_probability.double(), signal.double())
    except RuntimeError:
        raise ValueError(
            f"the leading dimensions of probability {tuple(log_probability.shape)} and signal "
            f"{tuple(signal.shape)} cannot be broadcast together."
        ) from None
    if (own.isnan() | own.isposinf()).any():
        raise ValueError("log_probability must be finite or -inf at every step, without NaN.")
    used = carried[..., 1:]
    if not ((used >= 0) & (used <= 1 + ABOVE_ONE)).all():
        raise ValueError("signal must lie in [0, 1] at every step but the first, without NaN.")
    dtype = torch.promote_types(log_probability.dtype, torch.promote_types(signal.dtype, torch.float32))
    return _recur(own, carried.log(), alpha).to(dtype)


def _recur(
    own: Float[Tensor, "*batch step"], carried: Float[Tensor, "*batch step"], alpha: float
) -> Float[Tensor, "*batch step"]:
    log_alpha = math.log(alpha) if alpha > 0 else -math.inf
    log_rest = math.log1p(-alpha) if alpha < 1 else -math.inf
    confidence = [own[..., 0]]
    for t in range(1, own.shape[-1]):
        inherited = log_rest + carried[..., t] + confidence[-1]
        confidence.append(torch.logaddexp(log_alpha + own[..., t], inherited))
    return torch.stack(confidence, -1)


def _check_floating(x: Tensor, what: str) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{what} must be a floating-point tensor [..., step], not {kind}.")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{what} must have at least one step, but its shape is {tuple(x.shape)}.")
