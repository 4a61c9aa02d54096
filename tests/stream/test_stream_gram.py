"""The half-stored Gram matrix against the full one."""

import pytest
import torch
from stream.dense import random_attention

from attnprobe.functional.gram import BlockGram, pending_square, pending_squares
from attnprobe.state import Columns, Gram

SIZES = [1, 2, 63, 64, 65, 127, 128, 129, 200]


def pattern(n, seed=0):
    return random_attention(n, seed).pattern


@pytest.mark.parametrize("n", SIZES)
def test_dense(n):
    a = pattern(n)
    gram = BlockGram()
    gram.add_(a)
    assert gram.size == n
    torch.testing.assert_close(gram.dense(), a.mT @ a, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("step", [1, 7, 64, 65])
@pytest.mark.parametrize("promise", [True, False])
def test_growth_with_and_without_the_causal_promise(n, step, promise):
    if step == 1 and n > 130:
        step = 3
    a = pattern(n)
    gram = BlockGram()
    for low in range(0, n, step):
        high = min(low + step, n)
        gram.add_(a[..., low:high, :high], causal_start=low if promise else None)
        assert gram.size == high
    torch.testing.assert_close(gram.dense(), a.mT @ a, rtol=1e-12, atol=1e-13)


def test_the_causal_promise_may_be_weak():
    a = pattern(140)
    gram = BlockGram()
    for low, high in ((0, 70), (70, 140)):
        gram.add_(a[..., low:high, :high], causal_start=low + 20)
    torch.testing.assert_close(gram.dense(), a.mT @ a, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("n", "split"), [(10, 3), (64, 1), (65, 64), (130, 63), (130, 129), (200, 100)])
@pytest.mark.parametrize("small_first", [True, False])
def test_merge_of_matrices_of_different_size(n, split, small_first):
    a = pattern(n)
    first, second = BlockGram(), BlockGram()
    first.add_(a[..., :split, :split], causal_start=0)
    second.add_(a[..., split:, :], causal_start=split)
    if not small_first:
        first, second = second, first
    kept = second.dense()
    first.merge_(second)
    torch.testing.assert_close(first.dense(), a.mT @ a, rtol=1e-12, atol=1e-13)
    assert torch.equal(second.dense(), kept)


def test_merge_with_nothing():
    a = pattern(5)
    full, empty = BlockGram(), BlockGram()
    full.add_(a)
    full.merge_(empty)
    empty.merge_(full)
    torch.testing.assert_close(empty.dense(), a.mT @ a)
    full.add_(a)  # what was merged is a copy
    torch.testing.assert_close(empty.dense(), a.mT @ a)


def test_merge_of_other_heads_is_refused():
    first, second = BlockGram(), BlockGram()
    first.add_(pattern(5))
    second.add_(pattern(5)[:, :1])
    with pytest.raises(ValueError, match="different batches or heads"):
        first.merge_(second)


@pytest.mark.parametrize("n", [1, 64, 65, 130])
@pytest.mark.parametrize("extra", [-1, 0, 5])
def test_weighted_squares_and_quadratic_forms(n, extra):
    a = pattern(n)
    g = a.mT @ a
    gram = BlockGram()
    gram.add_(a, causal_start=0)
    width = max(1, n + extra)
    vectors = torch.rand(2, 2, 3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    known = min(n, width)
    w, g = vectors[..., :known], g[..., :known, :known]
    expected = torch.einsum("bhjk,bhrj,bhrk->bhr", g.square(), w, w)
    torch.testing.assert_close(gram.weighted_square(vectors), expected, rtol=1e-12, atol=1e-13)
    expected = torch.einsum("bhjk,bhrj,bhrk->bhr", g, w, w)
    torch.testing.assert_close(gram.quadratic(vectors), expected, rtol=1e-12, atol=1e-13)


def test_pending_rows_are_valued_without_being_added():
    n, r = 70, 5
    a = pattern(n)
    gram = BlockGram()
    gram.add_(a[..., : n - r, : n - r], causal_start=0)
    weights = torch.rand(2, 2, r, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = pending_square(gram, a[..., n - r :, :], weights)
    for t in range(r):
        prefix = a[..., : n - r + t + 1, :]
        g = prefix.mT @ prefix
        w = weights[..., t, :]
        expected = torch.einsum("bhjk,bhj,bhk->bh", g.square(), w, w)
        torch.testing.assert_close(found[..., t], expected, rtol=1e-12, atol=1e-13)
    assert gram.size == n - r


def test_one_set_of_weights_serves_every_pending_prefix():
    n, r = 70, 6
    a = pattern(n)
    gram = BlockGram()
    gram.add_(a[..., : n - r, : n - r], causal_start=0)
    weights = torch.rand(2, 2, 1, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = pending_square(gram, a[..., n - r :, :], weights)
    every = pending_square(gram, a[..., n - r :, :], weights.expand(-1, -1, r, -1))
    torch.testing.assert_close(found, every, rtol=1e-12, atol=1e-13)


def test_several_sets_of_weights_go_through_one_pass(monkeypatch):
    n, r = 70, 5
    a = pattern(n)
    gram = BlockGram()
    gram.add_(a[..., : n - r, : n - r], causal_start=0)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.rand(2, 2, rows, n, dtype=torch.float64, generator=generator) for rows in (r, 1, r, 1)]
    alone = [pending_square(gram, a[..., n - r :, :], one) for one in weights]
    passes = []
    for name in ("weighted_square", "quadratic"):
        original = getattr(BlockGram, name)
        monkeypatch.setattr(BlockGram, name, lambda *args, f=original, n=name: passes.append(n) or f(*args))
    for found, expected in zip(pending_squares(gram, a[..., n - r :, :], weights), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert passes == ["weighted_square", "quadratic"]


def test_no_rows_at_all():
    with pytest.raises(ValueError, match="no rows"):
        BlockGram().dense()


def test_the_second_eigenvalue_is_computed_once_and_forgotten_when_rows_come(monkeypatch):
    calls = []
    from attnprobe.state import gram as module

    original = module.eigenvalue_beside
    monkeypatch.setattr(module, "eigenvalue_beside", lambda *args: calls.append(1) or original(*args))
    attention = random_attention(20, 2)
    gram, columns = Gram(), Columns()
    for rows in attention.chunks([9]):
        gram.update(rows)
        columns.update(rows)
        first = gram.intrinsic_spectrum(columns)
        assert gram.intrinsic_spectrum(columns) is first
    assert len(calls) == 2
