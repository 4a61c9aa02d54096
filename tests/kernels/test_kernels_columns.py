"""Column sums from queries and keys: the torch form and the Triton form against a dense float64 softmax."""

from dataclasses import replace

import pytest
import torch
from kernels.support import CASES, compiled, dense_sums, factors_of, many_rows, on

from attnprobe.kernels import column_sums
from attnprobe.kernels.choice import can_fuse
from attnprobe.kernels.columns import _torch_column_sums, _triton_column_sums

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def assert_sums(sums, factors, dtype=torch.float32):
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-13, "atol": 1e-13}
    for name, value, expected in zip(sums._fields, sums, dense_sums(factors), strict=True):
        assert value.dtype == dtype, name
        torch.testing.assert_close(value.double().cpu(), expected, **tolerance, msg=lambda m, name=name: f"{name}: {m}")


# -- the torch form ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows_at_once", [None, 7])
def test_the_torch_form_is_the_dense_softmax(case, rows_at_once):
    factors = CASES[case]()
    assert_sums(column_sums(factors, rows_at_once=rows_at_once), factors)


def test_float64_factors_are_summed_in_float64():
    factors = factors_of(70, dtype=torch.float64, kv_head=(0, 0, 1))
    assert_sums(column_sums(factors, rows_at_once=16), factors, torch.float64)


def test_a_block_of_rows_does_not_change_the_sums():
    factors = factors_of(130, dtype=torch.float64)
    for rows_at_once in (1, 64, 130, 1000):
        assert_sums(column_sums(factors, rows_at_once=rows_at_once), factors, torch.float64)


def test_no_rows_at_all_give_nothing():
    factors = factors_of(0, more_keys=3)
    assert all((value == 0).all() for value in column_sums(factors))
    assert column_sums(factors).mass.shape == (1, 1, 3)


def test_rows_at_once_must_be_a_number_of_rows():
    with pytest.raises(ValueError, match="1 or more"):
        column_sums(factors_of(3), rows_at_once=0)


def test_factors_are_left_as_they_are():
    factors = factors_of(20)
    q, k, position = factors.q.clone(), factors.k.clone(), factors.position.clone()
    column_sums(factors)
    assert factors.q.equal(q)
    assert factors.k.equal(k)
    assert factors.position.equal(position)


def test_a_torch_sum_over_many_rows_loses_no_digits():
    one_block, sums = (_torch_column_sums(many_rows(n), rows_at_once=64) for n in (64, 300 * 64))
    for value, block in zip(sums, one_block, strict=True):  # blocks alike, so rounding is all that may differ
        torch.testing.assert_close(value.double(), 300 * block.double(), rtol=1.2e-7, atol=0)


# -- the Triton form, in its interpreter -------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_triton_form_is_the_dense_softmax(case, interpreted):
    factors = CASES[case]()
    assert_sums(interpreted(_triton_column_sums, factors), factors)


def test_a_triton_sum_over_many_rows_loses_no_digits(interpreted):
    one_block = interpreted(_triton_column_sums, many_rows(32))
    sums = interpreted(_triton_column_sums, many_rows(40 * 32))
    # blocks alike, so rounding is all that may differ; every row stands at the last key, as in no real pattern
    for value, block in ((sums.mass, one_block.mass), (sums.energy[..., :4], one_block.energy[..., :4])):
        torch.testing.assert_close(value.double(), 40 * block.double(), rtol=6e-8, atol=0)
    torch.testing.assert_close(sums.off_diagonal.double(), 40 * one_block.off_diagonal.double(), rtol=6e-8, atol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_triton_takes_no_rows_at_all(padded, interpreted):
    sums = interpreted(_triton_column_sums, replace(factors_of(0, more_keys=3), padded=padded))
    assert all((value == 0).all() for value in sums)
    assert sums.mass.shape == (1, 1, 3)


def test_sequences_without_padding_may_share_their_positions(interpreted):
    factors = factors_of(20, batch=2)
    shared = replace(factors, position=factors.position[:1])
    assert_sums(interpreted(_triton_column_sums, shared), factors)
    assert_sums(column_sums(shared), factors)


@pytest.mark.parametrize(("elements", "size"), [("bf16", 64), ("fp32", 32)])
def test_the_kernels_compile_for_gpus(elements, size):
    pytest.importorskip("triton")
    from attnprobe.kernels import tiles

    constants = dict(elements=elements, WINDOWED=True, WIDEN=False, D=16, WIDTH=16, SIZE=size)
    for kernel in (tiles._row_kernel, tiles._column_kernel):
        ptx = compiled(kernel, 90, **constants)
        assert ("mma" in ptx) == (elements == "bf16")  # half precision goes through tensor cores, float32 does not
        assert "atom" not in ptx


# -- which form --------------------------------------------------------------------------------------------


def test_a_cpu_takes_the_torch_form():
    assert not can_fuse(factors_of(3))


@needs_gpu
def test_a_gpu_takes_the_triton_form_where_it_can():
    assert can_fuse(on(factors_of(3), "cuda"))
    assert can_fuse(on(factors_of(3, d=80, dtype=torch.bfloat16), "cuda"))
    assert not can_fuse(on(factors_of(3, dtype=torch.float64), "cuda"))
    assert not can_fuse(on(factors_of(3, d=320), "cuda"))


# -- on a GPU ----------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_both_forms_on_a_gpu_are_the_dense_softmax(case):
    factors = CASES[case]()
    assert_sums(_torch_column_sums(on(factors, "cuda")), factors)
    assert_sums(_triton_column_sums(on(factors, "cuda")), factors)
    assert_sums(column_sums(on(factors, "cuda")), factors)


@needs_gpu
@pytest.mark.parametrize("case", ["130 rows", "chosen heads", "left padding and window", "bfloat16", "views"])
def test_a_gpu_is_never_waited_for(case):
    factors = on(CASES[case](), "cuda")
    before = column_sums(factors)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = column_sums(factors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(value.equal(again) for value, again in zip(before, sums, strict=True))  # the same to the last bit


@needs_gpu
def test_no_block_of_rows_is_kept_on_a_gpu():
    factors = on(factors_of(8192, dtype=torch.bfloat16), "cuda")
    column_sums(factors)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    column_sums(factors)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20  # 64 rows of this pattern are 4 MB
