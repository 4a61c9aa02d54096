"""How far back attention looks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnprobe.functional.patterns import check_pattern
from attnprobe.functional.row_mean import mean_over_rows
from attnprobe.functional.sinks import check_excluded, without_keys


def mean_look_back(
    pattern: Float[Tensor, "*batch query key"],
    exclude: Sequence[int] = (),
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Mean over rows of the distance that attention looks back, tokens.

        d = (1/n) sum_i sum_j A_ij (i - j)

    Uniform causal attention looks back (n - 1)/4 tokens on average. In a bidirectional pattern a key ahead of its
    query counts negative. With `exclude` the weights on those keys are dropped and each row is divided by what is left
    of it; rows that have nothing left do not count. A sink at the start of the text dominates the plain distance.

    Args:
        pattern: [..., n, n], rows sum to 1.
        exclude: positions of tokens to leave out, from 0; `(0,)` leaves out the usual sink.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused, a key that is no token being nowhere.

    Returns:
        [...] tokens, in [0, (n - 1)/2] for a causal pattern without `exclude`; NaN where no row has anything left.

    Raises:
        ValueError: a negative position or one twice, or not a square pattern (`check_pattern`).
        TypeError: positions that are no whole numbers.

    >>> import torch
    >>> from attnprobe.functional import mean_look_back
    >>> pattern = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    >>> round(mean_look_back(pattern).item(), 4), mean_look_back(pattern, exclude=(0,)).item()
    (0.8333, 1.0)

    Source: attention distance of a head, as in arXiv 1906.04284 (Vig and Belinkov).
    """
    exclude = check_excluded(exclude)
    checked = check_pattern(
        pattern, rows=rows, mask=mask, square=True, why="a distance is between the positions of a query and a key"
    )
    weights, counted = checked.pattern, checked.real_rows
    if exclude:
        weights, counted = without_keys(weights, exclude)
    position = torch.arange(weights.shape[-2], device=weights.device)
    return mean_over_rows(look_back_of_rows(weights, position), counted)


def look_back_of_rows(
    pattern: Float[Tensor, "*batch query key"], position: Int[Tensor, "*batch query"]
) -> Float[Tensor, "*batch query"]:
    """sum_j A_ij (i - j) of each row, tokens; 0 of a row of zeros.

    Args:
        pattern: [..., query, key], key j being position j.
        position: [..., query] position of each query; broadcast.

    >>> import torch
    >>> look_back_of_rows(torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([2])).tolist()
    [1.0]
    """
    key = torch.arange(pattern.shape[-1], device=pattern.device)
    # distances are summed as they are: i less the mean key would be rounding where a head looks nearby
    distance = (position.unsqueeze(-1) - key).to(pattern.dtype)
    return torch.linalg.vecdot(pattern, distance)
