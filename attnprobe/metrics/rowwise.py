"""Metrics over many resamples at once.

Resampling asks for a metric thousands of times. Ours exist in a second form that takes a row a resample,
[..., answer], and gives [...]; any other metric is called row by row.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from sklearn.exceptions import UndefinedMetricWarning

from attnprobe.metrics.discrimination import auroc, auroc_rows, average_precision, average_precision_rows
from attnprobe.metrics.inputs import as_array, check_same_length
from attnprobe.metrics.rejection import prediction_rejection_ratio, ratio_rows

Metric = Callable[..., float]
RowMetric = Callable[..., Float[np.ndarray, "*row"]]

# Numbers in one temporary array of a row metric, which keeps about ten of them: 8 MB each.
_BATCH_NUMBERS = 1_000_000

_ROW_FORMS: dict[Metric, RowMetric] = {
    prediction_rejection_ratio: ratio_rows,
    auroc: auroc_rows,
    average_precision: average_precision_rows,
}


def paired_arrays(*values: ArrayLike, names: tuple[str, ...] | None = None) -> list[np.ndarray]:
    """The arrays of one sample, checked to be equally long; booleans become numbers, other dtypes are kept.

    Raises:
        ValueError: no array, not one-dimensional, lengths that differ.

    >>> [array.tolist() for array in paired_arrays([0.5, 1.0], [True, False])]
    [[0.5, 1.0], [1.0, 0.0]]
    """
    if not values:
        raise ValueError("there is no array to resample; give what the metric takes.")
    if names is None:
        names = tuple(f"array_{number}" for number in range(1, len(values) + 1))
    arrays = [as_array(value, name) for value, name in zip(values, names, strict=True)]
    check_same_length(**dict(zip(names, arrays, strict=True)))
    return [array.astype(np.float64) if array.dtype.kind == "b" else array for array in arrays]


def row_form(metric: Metric) -> RowMetric:
    """The form of a metric that takes rows. It reports NaN silently: a resample may well have no value.

    Keywords given by `functools.partial` are kept.

    >>> row_form(auroc)(np.array([[1.0, 2.0], [2.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 1.0]])).tolist()
    [1.0, 0.0]
    """
    # By identity: a callable of the user's need not be hashable.
    function, keywords = _unwrapped(metric)
    found = next((rows for ours, rows in _ROW_FORMS.items() if ours is function), None)
    if found is None:
        return functools.partial(_row_by_row, metric)
    return functools.partial(_as_numbers, found, keywords)


def batch_of(answers: int) -> int:
    """How many resamples of so many answers to take at once."""
    return max(1, _BATCH_NUMBERS // answers)


def seeded(function: Callable[..., Any], seed: int) -> dict[str, np.random.Generator]:
    """The keyword of a scipy function that sets its generator; it was renamed in scipy 1.15."""
    name = "rng" if "rng" in inspect.signature(function).parameters else "random_state"
    return {name: np.random.default_rng(seed)}


def _unwrapped(metric: Metric) -> tuple[Metric, dict[str, Any]]:
    if isinstance(metric, functools.partial) and not metric.args:
        return metric.func, metric.keywords
    return metric, {}


def _as_numbers(rows: RowMetric, keywords: dict[str, Any], *arrays: np.ndarray) -> Float[np.ndarray, "*row"]:
    return rows(*(array.astype(np.float64, copy=False) for array in arrays), **keywords)


def _row_by_row(metric: Metric, *arrays: np.ndarray) -> Float[np.ndarray, "*row"]:
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    tables = [np.broadcast_to(array, shape).reshape(-1, shape[-1]) for array in arrays]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedMetricWarning)
        values = [float(metric(*row)) for row in zip(*tables, strict=True)]
    return np.array(values).reshape(shape[:-1])
