"""What the metrics read: one number an answer, from a list, an array, a Series or a tensor."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from sklearn.exceptions import UndefinedMetricWarning

_PACKAGE = __name__.rpartition(".")[0]


def as_array(values: ArrayLike, name: str) -> np.ndarray:
    """A one-dimensional numpy array of the values in their own dtype; entries are not looked at.

    A tensor is detached and moved to the CPU, half precision becomes float64; a Series is taken by position,
    whatever its index.

    Raises:
        ValueError: not one-dimensional, or empty.

    >>> as_array([1, 2], "score").tolist()
    [1, 2]
    """
    array = np.asarray(_on_the_host(values))
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; give one value an answer, in one dimension.")
    if not len(array):
        raise ValueError(f"{name} is empty; give at least one answer.")
    return array


def answer_values(values: ArrayLike, name: str, *, infinite: bool = False) -> Float[np.ndarray, "answer"]:
    """The values as float64, checked.

    Args:
        values: [answer] numbers or booleans.
        name: what the error messages call them.
        infinite: whether infinities may stand among them.

    Raises:
        ValueError: not one-dimensional, empty, not numbers, NaN, or infinite where that has no meaning; the
            message names the first such index.

    >>> answer_values([True, False], "label").tolist()
    [1.0, 0.0]
    """
    array = as_array(values, name)
    try:
        # Text that happens to spell a number is more likely a mistake than a score.
        numbers = None if array.dtype.kind in "USc" else array.astype(np.float64)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None:
        raise ValueError(f"{name} holds {array.dtype} entries that are no real numbers; give one number an answer.")
    _refuse(np.isnan(numbers), f"{name} is NaN", "leave that answer out, or give it a number")
    if not infinite:
        _refuse(np.isinf(numbers), f"{name} is infinite", "give a finite number")
    return numbers


def binary_labels(values: ArrayLike, name: str = "label") -> Float[np.ndarray, "answer"]:
    """Labels as float64 zeros and ones.

    Raises:
        ValueError: as `answer_values`, or an entry that is neither 0 nor 1.

    >>> binary_labels([True, 0, 1.0]).tolist()
    [1.0, 0.0, 1.0]
    """
    labels = answer_values(values, name)
    _refuse((labels != 0) & (labels != 1), f"{name} is neither 0 nor 1", "cut graded values at a threshold first")
    return labels


def check_same_length(**arrays: np.ndarray) -> None:
    """Raise a ValueError unless all arrays have one entry for each of the same answers.

    >>> check_same_length(score=np.zeros(2), label=np.zeros(2))
    """
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise ValueError(f"the arrays have different lengths ({lengths}); give one entry for every answer in each.")


def check_count(value: int, name: str) -> None:
    """Raise a ValueError unless the value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} is {value!r}; give a whole number of at least 1.")


def warn_undefined(message: str) -> None:
    """Warn that a metric has no value on these answers and NaN is returned.

    The category is scikit-learn's, so that one filter serves for its metrics and ours. The warning is attributed to
    the first caller outside of this package, however many of our own functions lie between.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UndefinedMetricWarning, stacklevel=level)


def _on_the_host(values: Any) -> Any:
    # By its methods and not by its type: torch need not be there.
    if hasattr(values, "detach") and hasattr(values, "cpu"):
        values = values.detach().cpu()
        # numpy has no bfloat16.
        return values.double() if values.is_floating_point() else values
    return values


def _refuse(bad: np.ndarray, what: str, advice: str) -> None:
    if bad.any():
        raise ValueError(f"{what} at index {int(bad.argmax())}; {advice}.")
