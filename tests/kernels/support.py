"""Patterns by their factors, what the kernels must say of them, and a process with Triton's interpreter."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attnprobe.functional.factored import Factors

# -- the definition ----------------------------------------------------------------------------------------


def dense(factors: Factors) -> Tensor:
    """[batch, head, query, key] the pattern in float64, every score written out."""
    q = factors.q.double()
    k = torch.stack([factors.k[:, kv].double() for kv in factors.kv_head], 1)
    scores = factors.scaling * torch.einsum("bhqd,bhkd->bhqk", q, k)
    position = factors.position[:, None, :, None]
    key = torch.arange(factors.k.shape[2])
    seen = key <= position
    if factors.window is not None:
        seen &= key > position - factors.window
    weights = torch.where(seen, scores.exp(), 0.0)
    return weights / torch.where(position >= 0, weights.sum(-1, keepdim=True), 1.0)


def dense_sums(factors: Factors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mass, energy, and squares on and off the diagonal."""
    pattern = dense(factors)
    own = factors.position[:, None, :, None] == torch.arange(pattern.shape[-1])
    squares = pattern.square()
    return pattern.sum(-2), squares.sum(-2), (squares * own).sum((-2, -1)), (squares * ~own).sum((-2, -1))


# -- patterns ----------------------------------------------------------------------------------------------


def factors_of(
    n_query: int,
    *,
    batch: int = 1,
    kv_head: tuple[int, ...] = (0,),
    d: int = 16,
    first: int = 0,
    more_keys: int = 0,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> Factors:
    """Random rows first, first + 1, ... of unpadded sequences; `more_keys` keys stand after the last row."""
    generator = torch.Generator().manual_seed(n_query + 1000 * d)
    n_key = first + n_query + more_keys
    q = torch.randn(batch, len(kv_head), n_query, d, generator=generator).to(dtype)
    k = torch.randn(batch, max(kv_head) + 1, n_key, d, generator=generator).to(dtype)
    position = torch.arange(first, first + n_query).repeat(batch, 1)
    return Factors(q, k, position, kv_head, scaling=1.5 * d**-0.5, window=window, first=first)


def padded(position: list[list[int]], *, first: int = 0, window: int | None = None) -> Factors:
    """Random rows at given positions, -1 for padding."""
    unpadded = factors_of(len(position[0]), batch=len(position), first=first, window=window)
    return replace(unpadded, position=torch.tensor(position), padded=True)


def left(padding: int, n_query: int, first: int = 0) -> list[int]:
    return [-1] * padding + list(range(first, first + n_query - padding))


def right(padding: int, n_query: int) -> list[int]:
    return [*range(n_query - padding), *[-1] * padding]


def strided(factors: Factors) -> Factors:
    """The same numbers, with queries and keys that are views: [batch, query, head, d], and keys d first."""
    q = factors.q.transpose(1, 2).contiguous().transpose(1, 2)
    k = factors.k.mT.contiguous().mT
    position = factors.position.mT.contiguous().mT
    return replace(factors, q=q, k=k, position=position)


# Small on purpose: the interpreter takes some 20 ms a tile of 32 x 32 (float32) or 64 x 64 (half precision).
CASES: dict[str, Callable[[], Factors]] = {
    **{f"{n} rows": lambda n=n: factors_of(n) for n in (1, 2, 17, 64, 65, 130)},
    **{f"d = {d}": lambda d=d: factors_of(33, d=d) for d in (8, 64, 80)},
    "chunk": lambda: factors_of(37, first=70),
    "one row of many": lambda: factors_of(1, first=70),
    "keys after the last row": lambda: factors_of(20, more_keys=60),
    "window": lambda: factors_of(130, window=21),
    "window of 1": lambda: factors_of(40, window=1),
    "window wider than the rows": lambda: factors_of(40, window=1000),
    "window and chunk": lambda: factors_of(37, first=90, window=40),
    "grouped heads": lambda: factors_of(20, kv_head=(0, 0, 1, 1)),
    "one kv head": lambda: factors_of(20, kv_head=(0, 0, 0)),
    "chosen heads": lambda: factors_of(20, kv_head=(0, 1, 1, 3)),
    "batch": lambda: factors_of(33, batch=2),
    "left padding": lambda: padded([left(0, 70), left(41, 70)]),
    "right padding": lambda: padded([right(0, 70), right(41, 70)]),
    "left and right": lambda: padded([left(5, 33), right(3, 33)]),
    "a sequence of padding": lambda: padded([left(0, 33), left(33, 33)]),
    "only padding": lambda: padded([[-1] * 40]),
    "shorter sequences": lambda: padded([left(0, 33, 50), left(0, 33, 7)], first=50),
    "left padding and window": lambda: padded([left(0, 100), left(70, 100)], window=10),
    "right padding and window": lambda: padded([right(0, 100), right(70, 100)], window=10),
    "bfloat16": lambda: factors_of(130, dtype=torch.bfloat16),
    "bfloat16, d = 80": lambda: factors_of(65, d=80, dtype=torch.bfloat16),
    "float16": lambda: factors_of(65, dtype=torch.float16),
    "views": lambda: strided(factors_of(33, batch=2, kv_head=(0, 0))),
    "views in bfloat16": lambda: strided(factors_of(70, kv_head=(0, 1), dtype=torch.bfloat16)),
}


def many_rows(n_query: int) -> Factors:
    """All rows stand at position 4 and see five keys alike, so that a column sums many fifths."""
    q, k = torch.zeros(1, 1, n_query, 16), torch.zeros(1, 1, 5, 16)
    return Factors(q, k, torch.full((1, n_query), 4), (0,), scaling=1.0, first=4, padded=True)


def on(factors: Factors, device: str) -> Factors:
    return replace(factors, q=factors.q.to(device), k=factors.k.to(device), position=factors.position.to(device))


# -- Triton without a GPU ----------------------------------------------------------------------------------


class Interpreter:
    """A process in which kernels run in Triton's interpreter; it starts with TRITON_INTERPRET set, this one does not.

    Triton decides at its import whether kernels are compiled or interpreted, so both cannot be had in one process.
    """

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            assert self._pool.submit(_is_interpreter).result()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments), with tensors that keep their strides."""
        return pickle.loads(self._pool.submit(_call, pickle.dumps((function, arguments))).result())

    def close(self) -> None:
        self._pool.shutdown()


def _is_interpreter() -> bool:
    torch.set_num_threads(1)
    return os.environ["TRITON_INTERPRET"] == "1"


def _call(pickled: bytes) -> bytes:
    function, arguments = pickle.loads(pickled)
    return pickle.dumps(function(*arguments))


def compiled(kernel: Any, capability: int, **constants: Any) -> str:
    """PTX of a kernel for an NVIDIA GPU of that compute capability, which need not be there."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values = {name: value for name, value in constants.items() if name != "elements"}
    elements = constants["elements"]
    pointers = {"q": elements, "k": elements, "position": "i64", "kv_head": "i32", "shift": "i32"}
    signature = {}
    for name in kernel.arg_names:
        if name in values:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = "*" + pointers[name]
        elif name in ("top", "scale", "signs") or name.endswith("_out"):
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name == "scaling" else "i32"
    source = ASTSource(kernel, signature, values)
    return compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
