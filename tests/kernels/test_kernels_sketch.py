"""Mixtures of rows from queries and keys: the torch form and the Triton form against a dense float64 softmax."""

import pytest
import torch
from kernels.support import CASES, compiled, dense, factors_of, many_rows, on

from attnprobe.kernels import sketch_rows
from attnprobe.kernels.sketch import _torch_sketch_rows, _triton_sketch_rows

# The interpreter is slow; rows and scores are computed by what the column kernel uses too, and tested in full there.
INTERPRETED = [
    "1 rows",
    "17 rows",
    "130 rows",
    "d = 8",
    "d = 80",
    "window and chunk",
    "keys after the last row",
    "chosen heads",
    "left and right",
    "a sequence of padding",
    "left padding and window",
    "bfloat16",
    "views",
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def signs_for(factors, rank=5):
    """Random signs, different in every sequence, 0 for padded rows."""
    generator = torch.Generator().manual_seed(rank)
    batch, n_query = factors.position.shape
    signs = torch.randint(0, 2, (batch, rank, n_query), generator=generator) * 2.0 - 1.0
    return signs * (factors.position >= 0)[:, None]


def assert_sketch(sketch, factors, signs, dtype=torch.float32):
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    assert sketch.dtype == dtype
    expected = torch.einsum("brq,bhqk->bhrk", signs.double(), dense(factors))
    torch.testing.assert_close(sketch.double().cpu(), expected, **tolerance)


# -- the torch form ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows_at_once", [None, 7])
def test_the_torch_form_is_the_dense_product(case, rows_at_once):
    factors = CASES[case]()
    signs = signs_for(factors)
    assert_sketch(_torch_sketch_rows(factors, signs, rows_at_once=rows_at_once), factors, signs)
    assert_sketch(sketch_rows(factors, signs), factors, signs)


def test_float64_factors_are_mixed_in_float64():
    factors = factors_of(70, dtype=torch.float64, kv_head=(0, 0, 1))
    signs = signs_for(factors)
    assert_sketch(sketch_rows(factors, signs), factors, signs, torch.float64)


def test_padded_rows_add_nothing_whatever_their_sign():
    factors = CASES["left padding"]()
    signs = signs_for(factors)
    loud = torch.where((factors.position >= 0)[:, None], signs, 7.0)
    assert sketch_rows(factors, loud).equal(sketch_rows(factors, signs))


def test_signs_must_fit_the_rows():
    factors = factors_of(4, batch=2)
    for shape in ((2, 3, 5), (1, 3, 4), (3, 4)):
        with pytest.raises(ValueError, match=r"signs are \[batch, rank, query\] = \[2, rank, 4\]"):
            sketch_rows(factors, torch.ones(shape))


# -- the Triton form, in its interpreter -------------------------------------------------------------------


@pytest.mark.parametrize("case", INTERPRETED)
def test_the_triton_form_is_the_dense_product(case, interpreted):
    factors = CASES[case]()
    signs = signs_for(factors)
    assert_sketch(interpreted(_triton_sketch_rows, factors, signs), factors, signs)


@pytest.mark.parametrize("rank", [1, 32, 33, 70])
def test_ranks_are_cut_into_tiles(rank, interpreted):
    factors = factors_of(17)
    signs = signs_for(factors, rank)
    assert_sketch(interpreted(_triton_sketch_rows, factors, signs), factors, signs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
def test_signs_may_be_views_of_any_type(dtype, interpreted):
    factors = factors_of(17, batch=2)
    signs = signs_for(factors).to(dtype)
    expected = sketch_rows(factors, signs)
    views = [signs.mT.contiguous().mT, signs[:1].expand(2, -1, -1)]
    assert interpreted(_triton_sketch_rows, factors, views[0]).allclose(expected, atol=2e-6)
    assert_sketch(interpreted(_triton_sketch_rows, factors, views[1]), factors, views[1])


def test_padding_adds_nothing_to_the_triton_form_whatever_its_sign(interpreted):
    factors = CASES["left and right"]()
    signs = signs_for(factors)
    loud = torch.where((factors.position >= 0)[:, None], signs, 7.0)
    assert_sketch(interpreted(_triton_sketch_rows, factors, loud), factors, signs)


def test_a_sketch_of_many_rows_loses_no_digits(interpreted):
    one_block = interpreted(_triton_sketch_rows, many_rows(32), torch.ones(1, 1, 32))
    sketch = interpreted(_triton_sketch_rows, many_rows(40 * 32), torch.ones(1, 1, 40 * 32))
    # the blocks are alike, so rounding is all that may differ
    torch.testing.assert_close(sketch.double(), 40 * one_block.double(), rtol=6e-8, atol=0)


@pytest.mark.parametrize("elements", ["bf16", "fp32"])
def test_the_kernel_compiles_for_gpus(elements):
    pytest.importorskip("triton")
    from attnprobe.kernels import tiles

    constants = dict(elements=elements, WINDOWED=True, WIDEN=False, D=16, WIDTH=16, SIZE=32, RANK=32)
    ptx = compiled(tiles._sketch_kernel, 90, **constants)
    assert "tf32" not in ptx  # float32 stays float32
    assert "atom" not in ptx


# -- on a GPU ----------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_both_forms_on_a_gpu_are_the_dense_product(case):
    factors = CASES[case]()
    signs = signs_for(factors)
    there = on(factors, "cuda"), signs.cuda()
    assert_sketch(_torch_sketch_rows(*there), factors, signs)
    assert_sketch(_triton_sketch_rows(*there), factors, signs)
    assert_sketch(sketch_rows(*there), factors, signs)


@needs_gpu
@pytest.mark.parametrize("case", ["130 rows", "chosen heads", "left padding and window", "bfloat16", "views"])
def test_a_gpu_is_never_waited_for(case):
    factors = CASES[case]()
    signs = signs_for(factors, 33).cuda()
    factors = on(factors, "cuda")
    before = sketch_rows(factors, signs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        sketch = sketch_rows(factors, signs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sketch.equal(before)  # the same to the last bit
