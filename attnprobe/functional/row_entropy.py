"""Entropy of attention rows: over how many keys a query spreads its attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnprobe.functional.patterns import check_pattern
from attnprobe.functional.row_mean import mean_over_rows
from attnprobe.functional.sinks import check_excluded, on_tokens, without_keys


def row_entropy(
    pattern: Float[Tensor, "*batch query key"],
    exclude: Sequence[int] = (),
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Mean over rows of their entropy, nats.

        H = -(1/n) sum_i sum_j A_ij log A_ij

    With `exclude` the weights on those keys are dropped and each row is divided by what is left of it; rows that have
    nothing left (the first one, where the first token is dropped from causal attention) do not count.

    Args:
        pattern: [..., query, key], rows sum to 1; rectangular patterns are fine.
        exclude: positions of tokens to leave out, from 0; `(0,)` leaves out the usual sink.
        rows, mask: as in `check_pattern`. The extra key of `rows="sink"` is a key like the others, and it is left
            out too where any is.

    Returns:
        [...] in [0, log key]; NaN where no row has anything left.

    Raises:
        ValueError: a negative position or one twice, or not a pattern (`check_pattern`).
        TypeError: positions that are no whole numbers.

    >>> import torch
    >>> from attnprobe.functional import row_entropy
    >>> pattern = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.25, 0.25]])
    >>> round(row_entropy(pattern).item(), 4), round(row_entropy(pattern, exclude=(0,)).item(), 4)
    (0.5776, 0.3466)

    Source: [SG], row entropy of a head.
    """
    exclude = check_excluded(exclude)
    checked = check_pattern(pattern, rows=rows, mask=mask)
    weights, counted = checked.pattern, checked.real_rows
    if exclude:
        weights, counted = without_keys(on_tokens(checked), exclude)
    return mean_over_rows(entropy_of_rows(weights), counted)


def entropy_of_rows(pattern: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query"]:
    """Entropy of each row, nats; 0 of a row of zeros.

    >>> import torch
    >>> entropy_of_rows(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [0.6931471824645996, 0.0]
    """
    # 0 log 0 = 0, without the slow special function
    logs = pattern.clamp_min(torch.finfo(pattern.dtype).tiny).log_()
    return -torch.linalg.vecdot(pattern, logs) + 0.0  # adding 0 turns -0 into 0
