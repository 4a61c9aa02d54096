"""Runs of equal values in sorted rows: what every exact treatment of ties is made of."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def tie_bounds(ordered: Float[np.ndarray, "*row n"]) -> tuple[Int[np.ndarray, "*row n"], Int[np.ndarray, "*row n"]]:
    """First and last position of the run of equal values that each entry of a sorted row belongs to.

    Args:
        ordered: [..., n], every row sorted, in either direction; infinities equal one another.

    Returns:
        Two [..., n] arrays of positions 0..n-1.

    >>> first, last = tie_bounds(np.array([0.0, 1.0, 1.0, 2.0]))
    >>> first.tolist(), last.tolist()
    ([0, 1, 1, 3], [0, 2, 2, 3])
    """
    n = ordered.shape[-1]
    position = np.arange(n)
    changes = ordered[..., 1:] != ordered[..., :-1]
    edge = np.ones((*ordered.shape[:-1], 1), dtype=bool)
    starts = np.concatenate([edge, changes], axis=-1)
    ends = np.concatenate([changes, edge], axis=-1)
    first = np.maximum.accumulate(np.where(starts, position, 0), axis=-1)
    last = np.minimum.accumulate(np.where(ends, position, n - 1)[..., ::-1], axis=-1)[..., ::-1]
    return first, last


def run_means(values: Float[np.ndarray, "n"], ordered: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Each value replaced by the mean over its run of equal entries of `ordered`.

    >>> run_means(np.array([1.0, 0.0, 4.0]), np.array([2.0, 5.0, 5.0])).tolist()
    [1.0, 2.0, 2.0]
    """
    run = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
    return (np.bincount(run, values) / np.bincount(run))[run]
