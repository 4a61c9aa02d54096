"""Tiles of a causal pattern in Triton: what the kernels share, and the kernels themselves.

Two passes, as in memory-efficient attention. Pass one (`Tiles.of`) finds the largest score of each row and one over
its sum of exponentials: together the log-sum-exp, kept apart because their sum would round where scores are large. In
pass two (`Tiles.columns`, `Tiles.sketch`) a program takes one block of keys, goes through the blocks of rows that reach
it, computes the tile of the pattern again and adds it up. A block of keys belongs to one program, so there are no
atomics and results do not vary from run to run.

Scores of half precision multiply half-precision queries and keys (the products are exact in float32) and add up in
float32; float32 stays float32 (`input_precision="ieee"`). Sums over blocks carry what rounding loses (Kahan), so they
do not get worse with the number of rows.

Without Triton the module still imports, and `HAS_TRITON` is False; the kernels then are plain functions that nobody
calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.functional.factored import Factors

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

# What differs from call to call: a kernel is not compiled anew when one of them happens to be 1 or a multiple of 16.
_VARYING = ["n_query", "n_key", "first", "window", "rank", "position_batch", "signs_batch", "signs_rank"]
_NEVER = 1 << 30
# With `_size`: large tiles whose kernels spill no registers on sm_80 and sm_90 (compiled by Triton 3.7, not timed).
_SKETCH_SIZE = 32
_SKETCH_RANK = 32
_STAGES = 2


def _jit(kernel: Callable[..., Any]) -> Any:
    return triton.jit(do_not_specialize=_VARYING)(kernel) if HAS_TRITON else kernel


def _helper(function: Callable[..., Any]) -> Any:
    return triton.jit(function) if HAS_TRITON else function


# -- inside a kernel ---------------------------------------------------------------------------------------


@_helper
def _vectors(base, start, count, stride, d_stride, SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """[SIZE, WIDTH] vectors start, start + 1, ... of one head; zeros after the last and beyond d."""
    item = start + tl.arange(0, SIZE)
    column = tl.arange(0, WIDTH)
    inside = (item < count)[:, None] & (column < D)[None, :]
    return tl.load(base + item.to(tl.int64)[:, None] * stride + column[None, :] * d_stride, mask=inside, other=0.0)


@_helper
def _positions(base, start, n_query, stride, SIZE: tl.constexpr):
    """[SIZE] positions of rows start, start + 1, ...; -1 after the last, as for padding."""
    row = start + tl.arange(0, SIZE)
    place = tl.load(base + row.to(tl.int64) * stride, mask=row < n_query, other=0)
    return tl.where(row < n_query, place, -1).to(tl.int32)  # Triton 3.2 cannot pipeline a load with other=-1


@_helper
def _scores(query, key, position, at, scaling, window, WINDOWED: tl.constexpr, WIDEN: tl.constexpr):
    """[rows, keys] scaled products where a row may look, -inf elsewhere (a padded row looks nowhere)."""
    if WIDEN:
        query = query.to(tl.float32)
        key = key.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
    seen = at[None, :] <= position[:, None]
    if WINDOWED:
        seen = seen & (at[None, :] > position[:, None] - window)
    return tl.where(seen, scores, float("-inf"))


@_helper
def _carried(total, lost, value):
    """total + value, and what rounding has lost of it (Kahan)."""
    value = value - lost
    new = total + value
    return new, (new - total) - value


@_helper
def _weights(
    q,
    position,
    top,
    scale,
    key,
    at,
    start,
    n_query,
    q_row,
    q_d,
    position_row,
    scaling,
    window,
    WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """[rows, keys] tile of the pattern of one head, and the positions of its rows."""
    row = start + tl.arange(0, SIZE)
    place = _positions(position, start, n_query, position_row, SIZE)
    query = _vectors(q, start, n_query, q_row, q_d, SIZE, D, WIDTH)
    scores = _scores(query, key, place, at, scaling, window, WINDOWED, WIDEN)
    largest = tl.load(top + row, mask=row < n_query, other=0.0)
    share = tl.load(scale + row, mask=row < n_query, other=0.0)
    return tl.exp(scores - largest[:, None]) * share[:, None], place


@_helper
def _reaching(shift, begin, n_query, first, window, WINDOWED: tl.constexpr, SIZE: tl.constexpr):
    """The rows start <= i < stop among which all are that see one of the keys begin, ..., begin + SIZE - 1.

    Row i stands at first + i - s, where least <= s <= most is the padding before it.
    """
    least = tl.load(shift)
    most = tl.load(shift + 1)
    start = tl.maximum(begin - first + least, 0) // SIZE * SIZE
    stop = n_query
    if WINDOWED:
        stop = tl.minimum(n_query, begin + SIZE - 1 + window - first + most)
    return start, stop


# -- the kernels -------------------------------------------------------------------------------------------


@_jit
def _row_kernel(
    top_out,
    scale_out,
    q,
    k,
    position,
    kv_head,
    q_batch,
    q_head,
    q_row,
    q_d,
    k_batch,
    k_head,
    k_row,
    k_d,
    position_batch,
    position_row,
    scaling,
    heads,
    n_query,
    n_key,
    window,
    WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One block of rows of one head: its largest scores and one over the sums of exponentials."""
    head = tl.program_id(0)
    # late rows are long: they start first
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * SIZE
    batch = (head // heads).to(tl.int64)
    kv = tl.load(kv_head + head % heads).to(tl.int64)
    queries = _vectors(
        q + batch * q_batch + (head % heads).to(tl.int64) * q_head, start, n_query, q_row, q_d, SIZE, D, WIDTH
    )
    place = _positions(position + batch * position_batch, start, n_query, position_row, SIZE)
    keys = k + batch * k_batch + kv * k_head

    low = 0
    if WINDOWED:
        low = tl.maximum(tl.min(tl.where(place >= 0, place, n_key), 0) - window + 1, 0) // SIZE * SIZE
    high = tl.max(place, 0) + 1
    top = tl.full([SIZE], float("-inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    lost = tl.zeros([SIZE], tl.float32)
    for begin in range(low, high, SIZE):
        at = begin + tl.arange(0, SIZE)
        key = _vectors(keys, begin, n_key, k_row, k_d, SIZE, D, WIDTH)
        scores = _scores(queries, key, place, at, scaling, window, WINDOWED, WIDEN)
        largest = tl.maximum(top, tl.max(scores, 1))
        # a row that has seen no key yet has nothing to subtract
        base = tl.where(largest > float("-inf"), largest, 0.0)
        shrink = tl.exp(top - base)
        total, lost = _carried(total * shrink, lost * shrink, tl.sum(tl.exp(scores - base[:, None]), 1))
        top = largest

    row = start + tl.arange(0, SIZE)
    out = head.to(tl.int64) * n_query + row
    # padding: exp(-inf - 0) / 1 = 0
    tl.store(top_out + out, tl.where(place >= 0, top, 0.0), mask=row < n_query)
    tl.store(scale_out + out, 1.0 / tl.where(place >= 0, total, 1.0), mask=row < n_query)


@_jit
def _column_kernel(
    mass_out,
    energy_out,
    own_out,
    other_out,
    top,
    scale,
    shift,
    q,
    k,
    position,
    kv_head,
    q_batch,
    q_head,
    q_row,
    q_d,
    k_batch,
    k_head,
    k_row,
    k_d,
    position_batch,
    position_row,
    scaling,
    heads,
    n_query,
    n_key,
    first,
    window,
    WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One block of keys of one head: what it receives; squares on and off the diagonal as one number each."""
    head = tl.program_id(0)
    block = tl.program_id(1)
    batch = (head // heads).to(tl.int64)
    kv = tl.load(kv_head + head % heads).to(tl.int64)
    queries = q + batch * q_batch + (head % heads).to(tl.int64) * q_head
    places = position + batch * position_batch
    tops = top + head.to(tl.int64) * n_query
    scales = scale + head.to(tl.int64) * n_query
    begin = block * SIZE
    at = begin + tl.arange(0, SIZE)
    key = _vectors(k + batch * k_batch + kv * k_head, begin, n_key, k_row, k_d, SIZE, D, WIDTH)

    mass = tl.zeros([SIZE], tl.float32)
    mass_lost = tl.zeros([SIZE], tl.float32)
    other = tl.zeros([SIZE], tl.float32)
    other_lost = tl.zeros([SIZE], tl.float32)
    own = tl.zeros([SIZE], tl.float32)  # one row stands at each key, so this sum rounds nothing
    start, stop = _reaching(shift + 2 * batch, begin, n_query, first, window, WINDOWED, SIZE)
    for row in range(start, stop, SIZE):
        weight, place = _weights(
            queries,
            places,
            tops,
            scales,
            key,
            at,
            row,
            n_query,
            q_row,
            q_d,
            position_row,
            scaling,
            window,
            WINDOWED,
            WIDEN,
            D,
            WIDTH,
            SIZE,
        )
        square = weight * weight
        self_attention = at[None, :] == place[:, None]
        mass, mass_lost = _carried(mass, mass_lost, tl.sum(weight, 0))
        own += tl.sum(tl.where(self_attention, square, 0.0), 0)
        other, other_lost = _carried(other, other_lost, tl.sum(tl.where(self_attention, 0.0, square), 0))

    out = head.to(tl.int64) * n_key + at
    tl.store(mass_out + out, mass, mask=at < n_key)
    tl.store(energy_out + out, other + own, mask=at < n_key)
    part = head.to(tl.int64) * tl.num_programs(1) + block
    tl.store(own_out + part, tl.sum(own, 0))
    tl.store(other_out + part, tl.sum(other, 0))


@_jit
def _sketch_kernel(
    sketch_out,
    signs,
    signs_batch,
    signs_rank,
    signs_row,
    rank,
    top,
    scale,
    shift,
    q,
    k,
    position,
    kv_head,
    q_batch,
    q_head,
    q_row,
    q_d,
    k_batch,
    k_head,
    k_row,
    k_d,
    position_batch,
    position_row,
    scaling,
    heads,
    n_query,
    n_key,
    first,
    window,
    WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
):
    """One block of keys of one head, and RANK lines of the sketch."""
    head = tl.program_id(0)
    begin = tl.program_id(1) * SIZE
    line = tl.program_id(2) * RANK + tl.arange(0, RANK)
    batch = (head // heads).to(tl.int64)
    kv = tl.load(kv_head + head % heads).to(tl.int64)
    queries = q + batch * q_batch + (head % heads).to(tl.int64) * q_head
    places = position + batch * position_batch
    tops = top + head.to(tl.int64) * n_query
    scales = scale + head.to(tl.int64) * n_query
    lines = signs + batch * signs_batch + line.to(tl.int64)[:, None] * signs_rank
    at = begin + tl.arange(0, SIZE)
    key = _vectors(k + batch * k_batch + kv * k_head, begin, n_key, k_row, k_d, SIZE, D, WIDTH)

    total = tl.zeros([RANK, SIZE], tl.float32)
    lost = tl.zeros([RANK, SIZE], tl.float32)
    start, stop = _reaching(shift + 2 * batch, begin, n_query, first, window, WINDOWED, SIZE)
    for low in range(start, stop, SIZE):
        weight, _ = _weights(
            queries,
            places,
            tops,
            scales,
            key,
            at,
            low,
            n_query,
            q_row,
            q_d,
            position_row,
            scaling,
            window,
            WINDOWED,
            WIDEN,
            D,
            WIDTH,
            SIZE,
        )
        row = low + tl.arange(0, SIZE)
        inside = (line < rank)[:, None] & (row < n_query)[None, :]
        sign = tl.load(lines + row.to(tl.int64)[None, :] * signs_row, mask=inside, other=0.0).to(tl.float32)
        total, lost = _carried(total, lost, tl.dot(sign, weight, input_precision="ieee"))

    out = (head.to(tl.int64) * rank + line)[:, None] * n_key + at[None, :]
    tl.store(sketch_out + out, total, mask=(line < rank)[:, None] & (at < n_key)[None, :])


# -- launching them ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """Pass one done: what the kernels of pass two share.

    Attributes:
        factors: the pattern.
        arguments: of the kernels of pass two, by name.
    """

    factors: Factors
    arguments: dict[str, Any]

    @classmethod
    def of(cls, factors: Factors) -> Tiles:
        """Pass one: the largest score and one over the sum of exponentials of each row."""
        q, k = factors.q, factors.k
        batch, heads, n_query, d = q.shape
        position = factors.position.expand(batch, -1)  # sequences without padding may share one line
        shared = {
            "q": q,
            "k": k,
            "position": position,
            "kv_head": _kv_table(factors),
            **_strides(q, "q_batch", "q_head", "q_row", "q_d"),
            **_strides(k, "k_batch", "k_head", "k_row", "k_d"),
            **_strides(position, "position_batch", "position_row"),
            "scaling": float(factors.scaling),
            "heads": heads,
            "n_query": n_query,
            "n_key": k.shape[2],
            "window": factors.window or 0,
            "WINDOWED": factors.window is not None,
            # Triton's interpreter multiplies the bits of bfloat16 as integers
            "WIDEN": not q.is_cuda,
            "D": d,
            "WIDTH": _width(q),
        }
        top, scale = _empty(q, batch, heads, n_query), _empty(q, batch, heads, n_query)
        size = _size(q)
        with torch.cuda.device_of(q):
            _row_kernel[batch * heads, triton.cdiv(n_query, size)](top, scale, **shared, SIZE=size, num_stages=_STAGES)
        return cls(
            factors, {**shared, "top": top, "scale": scale, "shift": _shift(factors, position), "first": factors.first}
        )

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mass and energy [batch, head, key], squares on and off the diagonal [batch, head, blocks of keys]."""
        q, n_key = self.factors.q, self.factors.k.shape[2]
        (batch, heads), size = q.shape[:2], _size(q)
        blocks = triton.cdiv(n_key, size)
        mass, energy = _empty(q, batch, heads, n_key), _empty(q, batch, heads, n_key)
        own, other = _empty(q, batch, heads, blocks), _empty(q, batch, heads, blocks)
        with torch.cuda.device_of(q):
            _column_kernel[batch * heads, blocks](
                mass, energy, own, other, **self.arguments, SIZE=size, num_warps=size // 8, num_stages=_STAGES
            )
        return mass, energy, own, other

    def sketch(self, signs: Float[Tensor, "batch rank query"]) -> Float[Tensor, "batch head rank key"]:
        """signs @ pattern."""
        q, n_key, rank = self.factors.q, self.factors.k.shape[2], signs.shape[1]
        batch, heads = q.shape[:2]
        sketch = _empty(q, batch, heads, rank, n_key)
        grid = (batch * heads, triton.cdiv(n_key, _SKETCH_SIZE), triton.cdiv(rank, _SKETCH_RANK))
        with torch.cuda.device_of(q):
            _sketch_kernel[grid](
                sketch,
                signs,
                **_strides(signs, "signs_batch", "signs_rank", "signs_row"),
                rank=rank,
                **self.arguments,
                SIZE=_SKETCH_SIZE,
                RANK=_SKETCH_RANK,
                num_warps=8,
                num_stages=_STAGES,
            )
        return sketch


def _empty(q: Tensor, *shape: int) -> Tensor:
    """Room for what a kernel writes. One tensor each: kernels are compiled anew for pointers that are not aligned."""
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _width(q: Tensor) -> int:
    """Head dimension of a tile: a power of two, and what tl.dot takes at least."""
    return max(16, triton.next_power_of_2(q.shape[-1]))


def _size(q: Tensor) -> int:
    """Rows and keys of a tile. Products of float32 do not go through tensor cores and need the registers."""
    return 64 if q.element_size() == 2 and _width(q) <= 128 else 32


def _strides(tensor: Tensor, *names: str) -> dict[str, int]:
    return dict(zip(names, tensor.stride(), strict=True))


def _kv_table(factors: Factors) -> Int[Tensor, "head"]:
    """The key/value head of each head, written by the device: copying a list there would wait for it."""
    heads, kv_heads = len(factors.kv_head), factors.k.shape[1]
    device = factors.q.device
    if heads % kv_heads == 0 and factors.kv_head == tuple(head * kv_heads // heads for head in range(heads)):
        return torch.arange(heads, dtype=torch.int32, device=device) // (heads // kv_heads)
    table = torch.empty(heads, dtype=torch.int32, device=device)
    low = 0
    for kv, run in itertools.groupby(factors.kv_head):
        high = low + len(list(run))
        table[low:high].fill_(kv)
        low = high
    return table


def _shift(factors: Factors, position: Int[Tensor, "batch query"]) -> Int[Tensor, "batch 2"]:
    """Bounds of the padding before real rows: row i stands at first + i - s, where s lies between the two."""
    batch, n_query = position.shape
    if not factors.padded or n_query == 0:
        return torch.zeros(batch, 2, dtype=torch.int32, device=position.device)
    shift = torch.arange(factors.first, factors.first + n_query, device=position.device) - position
    least = torch.where(position >= 0, shift, _NEVER).amin(-1)  # no real row: no row reaches any key
    most = torch.where(position >= 0, shift, -_NEVER).amax(-1)
    return torch.stack([least, most], -1).to(torch.int32)
