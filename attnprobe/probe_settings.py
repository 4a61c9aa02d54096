"""What may be asked of a probe: layers, heads, analyzers, prompt lengths, each checked in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from attnprobe.analyzers.base import Analyzer

DEFAULT_PATTERN = "blocks.*.attn.hook_pattern"


def middle_layers(n_layers: int) -> list[int]:
    """L//3 to ceil(2L/3) inclusive, clipped to the model: 10 to 22 of 32 layers.

    >>> from attnprobe.probe_settings import middle_layers
    >>> middle_layers(32)[0], middle_layers(32)[-1], middle_layers(1), middle_layers(2)
    (10, 22, [0], [0, 1])
    """
    last = min(math.ceil(2 * n_layers / 3), n_layers - 1)
    return list(range(min(n_layers // 3, last), last + 1))


def named_layers(name: str, n_layers: int) -> list[int]:
    """The layers that "middle" (`middle_layers`) or "center" (L//2 alone) means in a model of L layers.

    >>> from attnprobe.probe_settings import named_layers
    >>> named_layers("center", 32), named_layers("center", 1)
    ([16], [0])
    """
    return middle_layers(n_layers) if name == "middle" else [n_layers // 2]


def check_analyzers(analyzers: Iterable[Analyzer]) -> tuple[Analyzer, ...]:
    if isinstance(analyzers, Analyzer):
        raise TypeError("a probe takes a list of analyzers: write Probe([analyzer]).")
    checked = tuple(analyzers)
    if not checked:
        raise ValueError("a probe needs at least one analyzer.")
    for analyzer in checked:
        if isinstance(analyzer, type) and issubclass(analyzer, Analyzer):
            raise TypeError(f"{analyzer.__name__} is a class: write {analyzer.__name__}() to make an analyzer.")
        if not isinstance(analyzer, Analyzer):
            raise TypeError(f"{analyzer!r} is no analyzer: derive its class from attnprobe.Analyzer.")
        if analyzer.layers is not None:
            check_layers(analyzer.layers)
    return checked


def check_layers(layers: str | Sequence[int]) -> str | tuple[int, ...]:
    if isinstance(layers, str):
        if layers not in ("all", "middle", "center"):
            raise ValueError(f"layers={layers!r}: use 'all', 'middle', 'center' or a list of layer numbers.")
        return layers
    numbers = _whole_numbers(layers, "layers")
    if not numbers or min(numbers) < 0:
        raise ValueError(f"layers={layers!r}: give at least one layer number, counted from 0.")
    return numbers


def check_heads(heads: str | Sequence[int]) -> tuple[int, ...] | None:
    if isinstance(heads, str):
        if heads != "all":
            raise ValueError(f"heads={heads!r}: use 'all' or a list of head numbers.")
        return None
    numbers = _whole_numbers(heads, "heads")
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ValueError(f"heads={heads!r}: give different head numbers, counted from 0.")
    return numbers


def _whole_numbers(given: Any, what: str) -> tuple[int, ...]:
    """One whole number or several, whatever holds them."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    listed = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    numbers = tuple(listed)
    if not all(isinstance(number, Integral) and not isinstance(number, bool) for number in numbers):
        raise TypeError(f"{what}={given!r}: give whole numbers.")
    return tuple(int(number) for number in numbers)


def check_prompt_lengths(lengths: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if lengths is None:
        return None
    numbers = _whole_numbers(lengths, "prompt_lengths")
    if not numbers or min(numbers) < 1:
        raise ValueError(f"prompt_lengths={lengths!r}: a prompt has at least one token.")
    return numbers


def parts_of(analyzers: Iterable[Analyzer]) -> tuple[str, ...]:
    needed = {"pattern"}
    for analyzer in analyzers:
        needed |= set(analyzer.needs) - {"tokens"}
    unknown = needed - {"pattern", "z", "v", "k", "q", "scores"}
    if unknown:
        raise ValueError(f"an analyzer needs {sorted(unknown)}: it may ask for pattern, z, v, k, q, scores, tokens.")
    return tuple(sorted(needed))


def ranges(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
