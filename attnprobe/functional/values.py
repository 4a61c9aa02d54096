"""Attention weighed by the values it brings: a large weight on a small value moves little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnprobe.functional.patterns import check_pattern
from attnprobe.functional.row_entropy import entropy_of_rows
from attnprobe.functional.row_mean import mean_over_rows
from attnprobe.functional.sinks import FIRST_TOKEN, check_keys, mass_on


class ValueWeighted(NamedTuple):
    """Means over rows of the pattern B_ij = A_ij ||v_j|| / sum_k A_ik ||v_k||, each of shape [...].

    Attributes:
        sink_score: mass of B on the chosen keys, in [0, 1].
        row_entropy: entropy of the rows of B, nats.
    """

    sink_score: Float[Tensor, "*batch"]
    row_entropy: Float[Tensor, "*batch"]


def value_weighted_attention(
    pattern: Float[Tensor, "*batch query key"],
    values: Float[Tensor, "*batch key d"],
    keys: Sequence[int] = FIRST_TOKEN,
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> ValueWeighted:
    """Sink score and row entropy of attention weighed by the norms of the values.

        B_ij = ||A_ij v_j|| / sum_k ||A_ik v_k||

    B is a pattern again, so it has a sink score and a row entropy as A has; with values of one norm they are those of
    A. Values are taken before the output projection.

    Args:
        pattern: [..., query, key], rows sum to 1; rectangular patterns are fine.
        values: [..., key, d], leading dimensions broadcast to the pattern's; repeat shared key/value heads first.
        keys: positions of the tokens that the sink score is about, from 0.
        rows, mask: as in `check_pattern`; the extra key of `rows="sink"` has value 0, so that B leaves it out.

    Returns:
        `ValueWeighted`. Rows whose values are all 0 do not count; NaN where none does.

    Raises:
        ValueError: no keys, a negative one, one twice, not a pattern (`check_pattern`), or values that do not fit it
            or are not finite.
        TypeError: keys that are no whole numbers.

    >>> import torch
    >>> from attnprobe.functional import value_weighted_attention
    >>> weighted = value_weighted_attention(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0], [3.0]]))
    >>> weighted.sink_score.item(), round(weighted.row_entropy.item(), 4)
    (0.25, 0.5623)

    Source: norm-based analysis of attention, arXiv 2004.10102 (Kobayashi et al.), of the values alone.
    """
    keys = check_keys(keys)
    checked = check_pattern(pattern, rows=rows, mask=mask)
    aligned = checked.align_keys(values.to(checked.dtype), "values")
    if not aligned.isfinite().all():
        raise ValueError("values of real tokens must be finite; look at the host's precision.")
    weighted, left = weigh_rows(checked.pattern, torch.linalg.vector_norm(aligned, dim=-1))
    counted = left & checked.real_rows
    on_tokens = weighted[..., 1:] if checked.sink else weighted
    return ValueWeighted(
        mean_over_rows(mass_on(on_tokens, keys), counted), mean_over_rows(entropy_of_rows(weighted), counted)
    )


def weigh_rows(
    pattern: Float[Tensor, "*batch query key"], norms: Float[Tensor, "*batch key"]
) -> tuple[Float[Tensor, "*batch query key"], Bool[Tensor, "*batch query"]]:
    """Rows weighed by the norm of each key's value, distributions again, and which rows have any weight.

    >>> import torch
    >>> weighted, left = weigh_rows(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0.0, 2.0]))
    >>> weighted.tolist(), left.tolist()
    ([[0.0, 1.0], [0.0, 0.0]], [True, False])
    """
    weighted = pattern * norms.unsqueeze(-2)
    total = weighted.sum(-1, keepdim=True)
    left = total != 0  # a norm that is no number stays one
    weighted /= total.where(left, 1.0)
    return weighted, left.squeeze(-1)
