"""The second eigenvalue without a dense eigenproblem, against a dense eigenproblem."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream.dense import dense_tdo, random_attention

from attnprobe.functional.lanczos import eigenvalue_beside


def dense(matrix, known):
    """Largest eigenvalue of the matrix restricted to the complement of `known`, by an explicit basis of it."""
    n = matrix.shape[-1]
    if known.norm() == 0:
        return float(torch.linalg.eigvalsh(matrix)[-1])
    if n == 1:
        return 0.0
    basis = torch.linalg.svd(known[None].double()).Vh[1:]
    return float(torch.linalg.eigvalsh(basis @ matrix.double() @ basis.T)[-1])


def intrinsic(a):
    """S of a pattern on all keys (zero rows for keys without mass) and its first eigenvector."""
    mass = a.sum(0)
    root = torch.where(mass > 0, mass.clamp_min(1e-300).rsqrt(), 0.0)
    s = a.T @ a * root[:, None] * root
    return s, mass.sqrt() / mass.sqrt().norm()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 80), seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 2.0, 8.0, 30.0]))
def test_random_causal_maps(n, seed, scale):
    a = random_attention(n, seed, batch=1, heads=1, scale=scale).pattern[0, 0]
    s, known = intrinsic(a)
    assert float(eigenvalue_beside(s, known)) == pytest.approx(dense(s, known), rel=1e-9, abs=1e-10)
    single = float(eigenvalue_beside(s.float(), known.float()))
    assert single == pytest.approx(dense(s, known), rel=5e-5, abs=5e-6)  # clusters below 1


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 60), rank=st.integers(1, 60), seed=st.integers(0, 10_000))
def test_any_semi_definite_matrix_and_eigenvector(n, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(min(rank, n), n, generator=generator, dtype=torch.float64)
    matrix = half.T @ half
    known = torch.linalg.eigh(matrix).eigenvectors[:, -1]
    expected = dense(matrix, known)
    scale = float(matrix.diagonal().sum())
    assert float(eigenvalue_beside(matrix, known)) == pytest.approx(expected, rel=1e-9, abs=1e-10 * scale)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 17, 64, 170, 300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_copy_sink_and_shift(n, dtype):
    copy, sink, shift = torch.eye(n), torch.zeros(n, n), torch.eye(n).roll(1, 0)
    sink[:, 0] = 1
    shift[0] = 0
    shift[0, 0] = 1
    for a, expected in ((copy, 1.0 if n > 1 else 0.0), (sink, 0.0), (shift, 1.0 if n > 2 else 0.0)):
        s, known = intrinsic(a.double())
        found = float(eigenvalue_beside(s.to(dtype), known.to(dtype)))
        assert found == pytest.approx(expected, abs=1e-9 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("n", [2, 3, 30, 200, 400])
def test_uniform_causal_attention(n):
    a = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]
    s, known = intrinsic(a)
    assert float(eigenvalue_beside(s, known)) == pytest.approx(dense(s, known), rel=1e-9)


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 40,
        [1.0, 1.0, 0.5] * 14,
        [1.0, 0.3] + [0.3] * 50,
        [1.0] + [0.0] * 50,
        [1.0, 1e-9] + [0.0] * 30,
        [1.0, 0.5, 0.5 - 1e-7] + [0.1] * 60,
        [1.0, *torch.linspace(0.99, 0.98, 220).tolist()],
    ],
)
def test_degenerate_and_flat_spectra(values):
    n = len(values)
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    spectrum = torch.tensor(values, dtype=torch.float64)
    matrix = basis * spectrum @ basis.T
    known = basis[:, 0]
    second = sorted(values[1:], reverse=True)[0]
    assert float(eigenvalue_beside(matrix, known)) == pytest.approx(second, rel=1e-9, abs=1e-11)
    assert float(eigenvalue_beside(matrix.float(), known.float())) == pytest.approx(second, rel=2e-5, abs=1e-6)


def test_diagonal_matrices_whose_start_meets_invariant_subspaces():
    for n in (2, 5, 33, 90):
        spectrum = torch.linspace(1, 0, n, dtype=torch.float64)
        known = torch.zeros(n, dtype=torch.float64)
        known[0] = 1
        assert float(eigenvalue_beside(torch.diag(spectrum), known)) == pytest.approx(float(spectrum[1]), abs=1e-10)


def test_two_components_that_do_not_meet():
    """A reducible map has lambda_2 = 1 beside the known one."""
    a = torch.zeros(60, 60, dtype=torch.float64)
    a[:30, :30] = random_attention(30, 1, batch=1, heads=1).pattern[0, 0]
    a[30:, 30:] = random_attention(30, 2, batch=1, heads=1).pattern[0, 0]
    s, known = intrinsic(a)
    assert float(eigenvalue_beside(s, known)) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("n", [6, 100])
def test_keys_without_mass(n):
    a = random_attention(n, 4, batch=1, heads=1).pattern[0, 0].clone()
    a[:, 2:5] = 0
    a[2:5, 0] += 1e-3
    a = a / a.sum(-1, keepdim=True)
    s, known = intrinsic(a)
    expected = float(torch.linalg.eigvalsh(dense_tdo(a))[-2])
    assert float(eigenvalue_beside(s, known)) == pytest.approx(expected, rel=1e-9)


def test_nothing_known():
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    assert float(eigenvalue_beside(matrix, torch.zeros(3, dtype=torch.float64))) == pytest.approx(3.0, abs=1e-9)


def test_leading_dimensions_and_unequal_neighbours():
    attention = random_attention(50, 5, batch=2, heads=3).pattern.clone()
    attention[0, 1] = torch.eye(50)
    attention[1, 0] = 0
    attention[1, 0, :, 0] = 1
    pairs = [[intrinsic(a) for a in row] for row in attention]
    s = torch.stack([torch.stack([pair[0] for pair in row]) for row in pairs])
    known = torch.stack([torch.stack([pair[1] for pair in row]) for row in pairs])
    found = eigenvalue_beside(s, known)
    assert found.shape == (2, 3)
    for i in range(2):
        for h in range(3):
            assert float(found[i, h]) == pytest.approx(dense(s[i, h], known[i, h]), rel=1e-9, abs=1e-9)


def test_the_answer_repeats_and_the_inputs_stay():
    s, known = intrinsic(random_attention(90, 5, batch=1, heads=1).pattern[0, 0])
    before = s.clone(), known.clone()
    torch.manual_seed(1)
    first = eigenvalue_beside(s, known)
    torch.manual_seed(2)
    assert torch.equal(first, eigenvalue_beside(s, known))
    assert torch.equal(s, before[0])
    assert torch.equal(known, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [100, 257])
@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
def test_the_batched_iteration_of_accelerators(dtype, n, scale):
    """The same code on the CPU: uniform, soft and sharp causal maps, all in one batch, and one without a spectrum."""
    from attnprobe.functional.lanczos import _block_lanczos

    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(5, n, n, generator=generator, dtype=torch.float64) * scale
    pattern = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    pattern = torch.cat([pattern, torch.eye(1, n, dtype=torch.float64).expand(1, n, n)])  # the last: all to one key
    mass = pattern.sum(-2)
    half = torch.where(mass.unsqueeze(-2) > 0, pattern / mass.clamp_min(1e-300).sqrt().unsqueeze(-2), 0.0)
    matrix, known = half.mT @ half, mass.sqrt() / mass.sqrt().norm(dim=-1, keepdim=True)
    expected = torch.linalg.eigvalsh(matrix)[:, -2].clamp_min(0.0)
    found = _block_lanczos(matrix.to(dtype), known.to(dtype).unsqueeze(1)).double()
    tolerance = 5e-5 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-5 if dtype == torch.float32 else 1e-9)
    torch.testing.assert_close(
        eigenvalue_beside(matrix.to(dtype), known.to(dtype)).double(), expected, rtol=tolerance, atol=1e-5
    )
