"""Scores before the softmax: their size, which the pattern does not show."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnprobe.functional.patterns import check_pattern
from attnprobe.functional.row_mean import mean_over_rows


def maximum_score(
    scores: Float[Tensor, "*batch query key"],
    pattern: Float[Tensor, "*batch query key"],
    *,
    rows: str = "error",
) -> Float[Tensor, "*batch"]:
    """Largest pre-softmax score of a row, mean over rows.

        s = (1/n) sum_i max_j S_ij,     A = softmax(S)

    Softmax forgets what is added to a row, so the pattern says nothing of this. Keys that a row may not see have the
    weight 0 in the pattern, and are left out whatever stands for them in the scores.

    Args:
        scores: [..., query, key] as they enter the softmax: scaled, with any softcap.
        pattern: [..., query, key], their softmax.
        rows: as in `check_pattern`; the extra key of `rows="sink"` is left out.

    Returns:
        [...] in units of the scores.

    Raises:
        ValueError: not a pattern (`check_pattern`), scores of another shape, or scores that are not those of the
            pattern.

    >>> import torch
    >>> from attnprobe.functional import maximum_score
    >>> scores = torch.tensor([[3.0, -torch.inf], [1.0, 2.0]])
    >>> maximum_score(scores, scores.softmax(-1)).item()
    2.5

    Source: growth of attention logits, arXiv 2302.05442 (Dehghani et al.).
    """
    if scores.shape != pattern.shape:
        raise ValueError(f"scores have shape {tuple(scores.shape)} and the pattern {tuple(pattern.shape)}: give both.")
    checked = check_pattern(pattern, rows=rows)
    weights = checked.pattern[..., 1:] if checked.sink else checked.pattern
    if bool(disagrees(scores, weights).any()):
        raise ValueError("the pattern is not the softmax of the scores: give the scores that enter the softmax.")
    return mean_over_rows(maximum_of_rows(scores, weights).to(checked.dtype), checked.real_rows)


def maximum_of_rows(
    scores: Float[Tensor, "*batch query key"], pattern: Float[Tensor, "*batch query key"]
) -> Float[Tensor, "*batch query"]:
    """The largest score of each row among the keys that it gives weight to; -inf where it gives none.

    >>> import torch
    >>> maximum_of_rows(torch.tensor([[1.0, 9.0]]), torch.tensor([[1.0, 0.0]])).tolist()
    [1.0]
    """
    return scores.where(pattern > 0, -torch.inf).amax(-1)


def disagrees(
    scores: Float[Tensor, "*batch query key"], pattern: Float[Tensor, "*batch query key"]
) -> Bool[Tensor, "*batch query"]:
    """Rows that are not the softmax of their scores, but for rounding and for mass that a sink took.

    >>> import torch
    >>> scores = torch.tensor([[0.0, 1.0]])
    >>> disagrees(scores, scores.softmax(-1)).tolist(), disagrees(scores.softmax(-1), scores.softmax(-1)).tolist()
    ([False], [True])
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    expected = scores.to(wide).where(pattern > 0, -torch.inf).softmax(-1)
    total = pattern.sum(-1, keepdim=True)
    gap = (pattern.to(wide) / total.where(total > 0, 1.0) - expected).abs().amax(-1)
    return (gap > _SOFTMAX_TOLERANCE) & (total.squeeze(-1) > 0)


_SOFTMAX_TOLERANCE = 2e-2  # scores that passed in bfloat16 have three digits
