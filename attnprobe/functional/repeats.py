"""What heads do where a token of the text comes again: look at it, or at what followed it."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnprobe.functional.patterns import CheckedPattern, check_pattern
from attnprobe.functional.row_mean import mean_over_rows


def duplicate_token_score(
    pattern: Float[Tensor, "*batch query key"],
    tokens: Int[Tensor, "*batch token"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Attention to earlier occurrences of the token at hand: mean over rows whose token came before.

        s = mean_i sum_{j < i, x_j = x_i} A_ij

    Args:
        pattern: [..., n, n], rows sum to 1.
        tokens: [..., n] token ids; leading dimensions are broadcast to the pattern's.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused.

    Returns:
        [...] in [0, 1]; NaN where no token comes twice.

    Raises:
        ValueError: not a square pattern (`check_pattern`), or tokens that do not fit it.
        TypeError: tokens that are no whole numbers.

    >>> import torch
    >>> from attnprobe.functional import duplicate_token_score
    >>> pattern = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.75, 0.25, 0.0]])
    >>> duplicate_token_score(pattern, torch.tensor([7, 8, 7])).item()
    0.75

    Source: duplicate token heads, arXiv 2211.00593 (Wang et al.).
    """
    return _score(pattern, tokens, rows, mask, following=False)


def induction_score(
    pattern: Float[Tensor, "*batch query key"],
    tokens: Int[Tensor, "*batch token"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Attention to what followed earlier occurrences of the token at hand: mean over rows whose token came before.

        s = mean_i sum_{j < i, x_j = x_i} A_{i, j+1}

    The token after the occurrence right before the query is the query itself (j + 1 = i), and counts.

    Args:
        pattern: [..., n, n], rows sum to 1.
        tokens: [..., n] token ids; leading dimensions are broadcast to the pattern's.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused.

    Returns:
        [...] in [0, 1]; NaN where no token comes twice.

    Raises:
        ValueError: not a square pattern (`check_pattern`), or tokens that do not fit it.
        TypeError: tokens that are no whole numbers.

    >>> import torch
    >>> from attnprobe.functional import induction_score
    >>> pattern = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.75, 0.25, 0.0]])
    >>> induction_score(pattern, torch.tensor([7, 8, 7])).item()
    0.25

    Source: prefix matching of induction heads, arXiv 2209.11895 (Olsson et al.).
    """
    return _score(pattern, tokens, rows, mask, following=True)


def earlier_occurrences(
    tokens: Int[Tensor, "*batch key"], position: Int[Tensor, "*batch query"]
) -> Bool[Tensor, "*batch query key"]:
    """Which keys before a query hold its token.

    Args:
        tokens: [..., key] token ids by position, -1 where there is none.
        position: [..., query] position of each query, -1 for none.

    >>> import torch
    >>> earlier_occurrences(torch.tensor([7, 8, 7]), torch.tensor([2, 1])).tolist()
    [[True, False, False], [False, False, False]]
    """
    own = tokens.gather(-1, position.clamp_min(0)).unsqueeze(-1)
    key = torch.arange(tokens.shape[-1], device=tokens.device)
    # before a query of no position there is no key
    return (tokens.unsqueeze(-2) == own) & (key < position.unsqueeze(-1))


def followers(earlier: Bool[Tensor, "*batch query key"]) -> Bool[Tensor, "*batch query key"]:
    """The keys right after some keys.

    >>> import torch
    >>> followers(torch.tensor([[True, False, True]])).tolist()
    [[False, True, False]]
    """
    return torch.nn.functional.pad(earlier, (1, -1))


def _score(
    pattern: Tensor, tokens: Tensor, rows: str, mask: Tensor | None, *, following: bool
) -> Float[Tensor, "*batch"]:
    checked = check_pattern(
        pattern, rows=rows, mask=mask, square=True, why="a token is looked for among the keys before its query"
    )
    n = checked.pattern.shape[-1]
    position = torch.arange(n, device=checked.pattern.device).where(checked.real_rows, -1)
    earlier = earlier_occurrences(_aligned(checked, tokens), position)
    looked_at = followers(earlier) if following else earlier
    weight = torch.linalg.vecdot(checked.pattern, looked_at.to(checked.dtype))
    return mean_over_rows(weight, earlier.any(-1))


def _aligned(checked: CheckedPattern, tokens: Tensor) -> Int[Tensor, "*batch key"]:
    """Token ids in the order of the pattern's keys."""
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"tokens must be a tensor of token ids, not {kind}.")
    n = checked.pattern.shape[-1]
    try:
        by_key = tokens.to(checked.pattern.device).expand(*checked.batch, n)
    except RuntimeError:
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)} do not fit a pattern of shape {tuple(checked.pattern.shape)}: give "
            "[token], or one leading dimension for each of the pattern's, 1 where they share it."
        ) from None
    return by_key if checked.order is None else by_key.gather(-1, checked.order)
