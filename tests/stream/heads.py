"""Head diagnostics by definition: loops over rows and keys of one pattern, in plain floating point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import attnprobe as ap

Row = Callable[[list[float], int, list[int], list[float]], float]


def mean(values: Iterable[float]) -> float:
    some = [value for value in values if not math.isnan(value)]
    return sum(some) / len(some) if some else math.nan


def dropped(row: list[float], keys: tuple[int, ...]) -> list[float]:
    """The row without some keys, divided by what is left of it; NaN where that is nothing."""
    left = sum(weight for j, weight in enumerate(row) if j not in keys)
    return [math.nan if left == 0 else 0.0 if j in keys else weight / left for j, weight in enumerate(row)]


def sink(*keys: int) -> Row:
    return lambda row, i, tokens, norms: sum(weight for j, weight in enumerate(row) if j in keys)


def entropy(*without: int) -> Row:
    def of(row, i, tokens, norms):
        row = dropped(row, without)
        return math.nan if any(map(math.isnan, row)) else -sum(w * math.log(w) for w in row if w > 0)

    return of


def look_back(*without: int) -> Row:
    return lambda row, i, tokens, norms: sum(w * (i - j) for j, w in enumerate(dropped(row, without)))


def weight_at(back: int, *without: int) -> Row:
    def of(row, i, tokens, norms):
        return dropped(row, without)[i - back] if i >= back and i - back not in without else math.nan

    return of


def duplicate(row: list[float], i: int, tokens: list[int], norms: list[float]) -> float:
    earlier = [j for j in range(i) if tokens[j] == tokens[i]]
    return sum(row[j] for j in earlier) if earlier else math.nan


def induction(row: list[float], i: int, tokens: list[int], norms: list[float]) -> float:
    earlier = [j for j in range(i) if tokens[j] == tokens[i]]
    return sum(row[j + 1] for j in earlier) if earlier else math.nan


def weighed(row: list[float], norms: list[float]) -> list[float]:
    total = sum(w * norm for w, norm in zip(row, norms, strict=True))
    return [w * norm / total if total else math.nan for w, norm in zip(row, norms, strict=True)]


def weighted_sink(*keys: int) -> Row:
    return lambda row, i, tokens, norms: sum(w for j, w in enumerate(weighed(row, norms)) if j in keys)


def weighted_entropy(row: list[float], i: int, tokens: list[int], norms: list[float]) -> float:
    row = weighed(row, norms)
    return math.nan if any(map(math.isnan, row)) else -sum(w * math.log(w) for w in row if w > 0)


# analyzer -> name of each result -> its value at one row
DIAGNOSTICS: dict[str, tuple[Callable[..., ap.Analyzer], dict[str, Row]]] = {
    "sink": (ap.SinkScore, {"sink_score": sink(0)}),
    "sinks": (lambda **o: ap.SinkScore([5, 0, 2], **o), {"sink_score_keys_0_2_5": sink(0, 2, 5)}),
    "entropy": (ap.RowEntropy, {"row_entropy": entropy()}),
    "entropy without sink": (
        lambda **o: ap.RowEntropy(exclude_sink=True, **o),
        {"row_entropy_without_sink": entropy(0)},
    ),
    "entropy without keys": (
        lambda **o: ap.RowEntropy(exclude_sink=[3, 0], **o),
        {"row_entropy_without_keys_0_3": entropy(0, 3)},
    ),
    "look-back": (ap.MeanLookBack, {"mean_look_back": look_back()}),
    "look-back without sink": (
        lambda **o: ap.MeanLookBack(exclude_sink=True, **o),
        {"mean_look_back_without_sink": look_back(0)},
    ),
    "self": (ap.SelfAttention, {"self_attention": weight_at(0)}),
    "self without sink": (
        lambda **o: ap.SelfAttention(exclude_sink=True, **o),
        {"self_attention_without_sink": weight_at(0, 0)},
    ),
    "previous": (ap.PreviousTokenAttention, {"previous_token_attention": weight_at(1)}),
    "previous without keys": (
        lambda **o: ap.PreviousTokenAttention(exclude_sink=(0, 4), **o),
        {"previous_token_attention_without_keys_0_4": weight_at(1, 0, 4)},
    ),
    "duplicate": (ap.DuplicateTokenScore, {"duplicate_token_score": duplicate}),
    "induction": (ap.InductionScore, {"induction_score": induction}),
    "value-weighted": (
        ap.ValueWeightedAttention,
        {"value_weighted_sink_score": weighted_sink(0), "value_weighted_row_entropy": weighted_entropy},
    ),
    "value-weighted, keys": (
        lambda **o: ap.ValueWeightedAttention([1, 2], **o),
        {"value_weighted_sink_score_keys_1_2": weighted_sink(1, 2), "value_weighted_row_entropy": weighted_entropy},
    ),
}


def at_rows(of: Row, pattern: Tensor, tokens: Tensor, norms: Tensor) -> list[float]:
    """The value at every row of one pattern [n, n]; tokens and norms [n]."""
    return [of(row, i, tokens.tolist(), norms.double().tolist()) for i, row in enumerate(pattern.double().tolist())]


def dense(of: Row, pattern: Tensor, tokens: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over rows [batch, head], and every row [batch, head, n], of patterns [batch, head, n, n].

    Tokens are [batch, n], norms [batch, head, n].
    """
    rows = [
        [at_rows(of, a, ids, norm) for a, norm in zip(heads, by_head, strict=True)]
        for heads, ids, by_head in zip(pattern, tokens, norms, strict=True)
    ]
    means = [[mean(head) for head in heads] for heads in rows]
    return torch.tensor(means, dtype=torch.float64), torch.tensor(rows, dtype=torch.float64)
