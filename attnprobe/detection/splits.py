"""Splits that keep the answers of one question together, and both labels on both sides."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from sklearn.model_selection import StratifiedGroupKFold


def group_numbers(groups: Sequence[Hashable] | ArrayLike | None, n: int) -> Int[np.ndarray, "text"]:
    """A number for every group; without groups every text is one of its own.

    Raises:
        ValueError: not one group a text.

    >>> group_numbers(["q7", "q1", "q7"], 3).tolist()
    [0, 1, 0]
    """
    if groups is None:
        return np.arange(n)
    given: Any = groups
    listed: list[Any] = given.tolist() if hasattr(given, "tolist") else list(given)
    if len(listed) != n:
        raise ValueError(f"there are {len(listed)} groups for {n} texts: give one for each.")
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in listed])


def folds(
    labels: Float[np.ndarray, "text"], groups: Int[np.ndarray, "text"], n_folds: int, seed: int
) -> list[Bool[np.ndarray, "text"]]:
    """Which texts are in each fold; groups are whole, and the shares of the labels as equal as they can be.

    Raises:
        ValueError: fewer groups than folds, or a fold in which, or beside which, a label does not occur.

    >>> first, second = folds(np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]), 2, seed=0)
    >>> sorted([first.tolist(), second.tolist()])
    [[False, False, True, True], [True, True, False, False]]

    Source: `sklearn.model_selection.StratifiedGroupKFold`.
    """
    if n_folds < 2:
        raise ValueError(f"{n_folds} folds: use at least 2.")
    if len(np.unique(groups)) < n_folds:
        raise ValueError(
            f"there are {len(np.unique(groups))} groups for {n_folds} folds: give more texts, or use fewer folds."
        )
    splitter = StratifiedGroupKFold(n_folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few of a label is an error below
        try:
            parts = [test for _, test in splitter.split(np.zeros((len(labels), 1)), labels, groups)]
        except ValueError:
            parts = []
    found = [np.isin(np.arange(len(labels)), part) for part in parts]
    if not found or any(len(np.unique(labels[side])) < 2 for fold in found for side in (fold, ~fold)):
        raise ValueError(
            f"{len(labels)} texts, {int(labels.sum())} of them with label 1, cannot be split into {n_folds} folds with "
            "both labels in each: give more texts, or use fewer folds."
        )
    return found


def held_out(
    labels: Float[np.ndarray, "text"], groups: Int[np.ndarray, "text"], share: float, seed: int
) -> Bool[np.ndarray, "text"]:
    """Which texts are held out for testing: the first of round(1/share) folds.

    Raises:
        ValueError: a share that is not above 0 and at most 1/2, or as `folds`.

    >>> int(held_out(np.array([0, 1] * 10), np.arange(20), 0.2, seed=0).sum())
    4
    """
    if not 0 < share <= 0.5:
        raise ValueError(f"a share of {share} cannot be held out: use a number above 0 and at most 0.5.")
    return folds(labels, groups, round(1 / share), seed)[0]
