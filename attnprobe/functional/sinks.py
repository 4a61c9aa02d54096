"""Sinks: keys that take attention whatever the query, how much of it, and what is left without them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from jaxtyping import Bool, Float
from torch import Tensor

from attnprobe.functional.patterns import CheckedPattern, check_pattern
from attnprobe.functional.row_mean import mean_over_rows

FIRST_TOKEN = (0,)


def sink_score(
    pattern: Float[Tensor, "*batch query key"],
    keys: Sequence[int] = FIRST_TOKEN,
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Attention that goes to the first token, or to any chosen set of keys: mean over rows.

        s = (1/n) sum_i sum_{j in keys} A_ij

    Every row counts, the first one too, which in causal attention can look at nothing but the first token: the score
    on the first token is at least 1/n there.

    Args:
        pattern: [..., query, key], rows sum to 1; rectangular patterns are fine.
        keys: positions of tokens, from 0. Keys that a sequence does not have receive nothing.
        rows, mask: as in `check_pattern`; positions count real tokens, and the extra key of `rows="sink"` is not one.

    Returns:
        [...] in [0, 1].

    Raises:
        ValueError: no keys, a negative one, one twice, or not a pattern (`check_pattern`).
        TypeError: keys that are no whole numbers.

    >>> import torch
    >>> from attnprobe.functional import sink_score
    >>> sink_score(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).item()
    0.75

    Source: [SG], sink score of a head; attention sinks, arXiv 2309.17453.
    """
    keys = check_keys(keys)
    checked = check_pattern(pattern, rows=rows, mask=mask)
    return mean_over_rows(mass_on(on_tokens(checked), keys), checked.real_rows)


def check_keys(keys: Sequence[int], what: str = "keys") -> tuple[int, ...]:
    """The positions in order, if they are positions.

    Args:
        keys: positions from 0, at least one, all different.
        what: what the sentences of errors call them.

    Raises:
        ValueError: no positions, a negative one, or one twice.
        TypeError: not whole numbers.

    >>> check_keys([4, 0])
    (0, 4)
    """
    try:
        given = tuple(keys)
    except TypeError:
        raise TypeError(f"{what}={keys!r}: give positions as a list of whole numbers, such as [0].") from None
    if not all(isinstance(key, Integral) and not isinstance(key, bool) for key in given):
        raise TypeError(f"{what}={keys!r}: give positions as a list of whole numbers, such as [0].")
    if not given or min(given) < 0 or len(set(given)) < len(given):
        raise ValueError(f"{what}={keys!r}: give at least one position, counted from 0, and each of them once.")
    return tuple(sorted(int(key) for key in given))


def check_excluded(exclude: Sequence[int]) -> tuple[int, ...]:
    """The positions to leave out, in order; none is fine here.

    Raises:
        ValueError, TypeError: as `check_keys`.

    >>> check_excluded(())
    ()
    """
    empty = isinstance(exclude, Sequence) and not len(exclude)
    return () if empty else check_keys(exclude, "exclude")


def on_tokens(checked: CheckedPattern) -> Float[Tensor, "*batch query key"]:
    """The columns that are tokens: without the extra key of `rows="sink"`."""
    return checked.pattern[..., 1:] if checked.sink else checked.pattern


def mass_on(weights: Float[Tensor, "*axes key"], keys: tuple[int, ...]) -> Float[Tensor, "*axes"]:
    """Sum of the weights of some keys, those that are not there counting 0.

    >>> import torch
    >>> mass_on(torch.tensor([[0.25, 0.75]]), (1, 7)).tolist()
    [0.75]
    """
    there = [key for key in keys if key < weights.shape[-1]]
    if not there:
        return weights.new_zeros(weights.shape[:-1])
    # one column after another: an index list would travel to the device
    total = weights[..., there[0]]
    for key in there[1:]:
        total = total + weights[..., key]
    return total


def without_keys(
    pattern: Float[Tensor, "*batch query key"], keys: tuple[int, ...]
) -> tuple[Float[Tensor, "*batch query key"], Bool[Tensor, "*batch query"]]:
    """Rows without some keys, each made a distribution again, and which rows have anything left.

    The keys stay in their places, with weight 0; a row whose whole mass was on them is a row of zeros.

    >>> import torch
    >>> rest, left = without_keys(torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]]), (0,))
    >>> rest.tolist(), left.tolist()
    ([[0.0, 0.0, 0.0], [0.0, 0.5, 0.5]], [False, True])
    """
    rest = pattern.clone()
    for key in keys:
        if key < rest.shape[-1]:
            rest[..., key] = 0.0
    # summed without the keys, not 1 less their mass, which would be rounding where they take nearly all
    total = rest.sum(-1, keepdim=True)
    left = total > 0
    rest /= total.where(left, 1.0)
    return rest, left.squeeze(-1)
