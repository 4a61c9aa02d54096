"""Which form of a kernel runs, and the row blocks of the torch form."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from attnprobe.functional.factored import Factors

_FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256
_OLDEST_CAPABILITY = (8, 0)  # what Triton supports of CUDA; older GPUs take the torch form
# A row block where the caller sets no size: more rows leave the caches of a CPU and compute more hidden keys.
_BLOCK_ROWS = 64
_BLOCK_NUMBERS = 1 << 23  # 32 MB in float32


def can_fuse(factors: Factors) -> bool:
    """The Triton form can compute these rows: on a GPU that Triton supports, not float64, d at most 256.

    >>> import torch
    >>> q = torch.zeros(1, 1, 3, 16)
    >>> can_fuse(Factors(q, q, torch.arange(3)[None], kv_head=(0,), scaling=1.0))  # not on a CPU
    False
    """
    q, k = factors.q, factors.k
    return (
        q.is_cuda
        and k.device == q.device == factors.position.device
        and k.dtype == q.dtype
        and q.dtype in _FUSED_DTYPES
        and q.shape[-1] <= _WIDEST_HEAD
        and _supported(q.device)
    )


def row_blocks(factors: Factors, rows_at_once: int | None) -> Iterator[slice]:
    """The rows in order, in blocks of `rows_at_once`: by default 64, or as few as make 8 million numbers.

    >>> import torch
    >>> q = torch.zeros(1, 1, 5, 16)
    >>> list(row_blocks(Factors(q, q, torch.arange(5)[None], kv_head=(0,), scaling=1.0), 3))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    batch, heads, n_query, _ = factors.q.shape
    if rows_at_once is None:
        numbers = max(1, batch * heads * factors.k.shape[2])  # of one row
        rows_at_once = min(_BLOCK_ROWS, max(1, _BLOCK_NUMBERS // numbers))
    elif rows_at_once < 1:
        raise ValueError(f"rows_at_once is a number of rows, 1 or more; got {rows_at_once}.")
    for low in range(0, n_query, rows_at_once):
        yield slice(low, min(low + rows_at_once, n_query))


@functools.cache
def _supported(device: torch.device) -> bool:
    from attnprobe.kernels.tiles import HAS_TRITON

    cuda = torch.version.hip is None  # AMD's GPUs call themselves cuda too; nobody has run the kernels there
    return HAS_TRITON and cuda and torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY
