import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import (
    asymmetry,
    hodge_from_columns,
    hodge_split,
    participation_ratio,
    spectral_capacity,
    tdo_spectrum,
)

SIZES = st.integers(1, 7)
SEEDS = st.integers(0, 10_000)
SCALES = st.sampled_from([0.0, 1.0, 4.0, 1000.0])


def dense_asymmetry(x):
    n = x.shape[0]
    skew = sum(((x[i, j] - x[j, i]) / 2).item() ** 2 for i in range(n) for j in range(n))
    return math.sqrt(skew / (x**2).sum().item())


def doubly_stochastic(pattern):
    for _ in range(2000):
        pattern = pattern / pattern.sum(-2, keepdim=True)
        pattern = pattern / pattern.sum(-1, keepdim=True)
    return pattern


def test_asymmetry_by_its_definition(make_pattern):
    for causal in (True, False):
        pattern = make_pattern(5, seed=1, causal=causal)
        assert asymmetry(pattern).item() == pytest.approx(dense_asymmetry(pattern))
        normalized = torch.diag(pattern.sum(1) ** -0.5) @ pattern @ torch.diag(pattern.sum(0) ** -0.5)
        assert asymmetry(pattern, "normalized").item() == pytest.approx(dense_asymmetry(normalized))


def test_normalized_operator_drops_unattended_keys():
    pattern = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]).double()
    normalized = pattern.clone()
    normalized[:, :2] /= pattern[:, :2].sum(0).sqrt()
    assert asymmetry(pattern, "normalized").item() == pytest.approx(dense_asymmetry(normalized))


def test_closed_forms(make_pattern):
    symmetric = make_pattern(4, seed=2)
    symmetric = doubly_stochastic(symmetric + symmetric.T)
    symmetric = (symmetric + symmetric.T) / 2
    assert asymmetry(symmetric).item() == pytest.approx(0.0, abs=1e-9)
    # A long shift has no entry in common with its transpose: the causal ceiling 1/sqrt(2).
    cycle = torch.eye(5).double().roll(1, 0)
    assert asymmetry(cycle).item() == pytest.approx(1 / math.sqrt(2))
    split = hodge_split(cycle)
    assert split.curl.item() == pytest.approx(1 / math.sqrt(2))
    assert split.gradient.item() == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(n=SIZES, seed=SEEDS, scale=SCALES)
def test_causal_mask_bounds_asymmetry(make_pattern, n, seed, scale):
    pattern = make_pattern(n, seed=seed, scale=scale, causal=True)
    assert 0 <= asymmetry(pattern) <= 1 / math.sqrt(2) + 1e-12


@settings(max_examples=30, deadline=None)
@given(n=SIZES, seed=SEEDS, scale=SCALES, causal=st.booleans())
def test_hodge_parts_are_a_pythagorean_split(make_pattern, n, seed, scale, causal):
    pattern = make_pattern(n, seed=seed, scale=scale, causal=causal)
    split = hodge_split(pattern)
    assert split.asymmetry.item() == pytest.approx(asymmetry(pattern).item(), abs=1e-12)
    assert split.asymmetry.item() ** 2 == pytest.approx(split.gradient.item() ** 2 + split.curl.item() ** 2, abs=1e-12)
    # The gradient part is the closest flow s_i - s_j, found here by least squares over potentials.
    flow = (pattern - pattern.T) / 2
    differences = torch.zeros(n * n, n).double()
    for i in range(n):
        for j in range(n):
            differences[i * n + j, i] += 1
            differences[i * n + j, j] -= 1
    projection = differences @ torch.linalg.pinv(differences) @ flow.reshape(-1)
    energy = (pattern**2).sum().item()
    assert split.gradient.item() ** 2 == pytest.approx((projection**2).sum().item() / energy, abs=1e-10)
    rest = flow.reshape(-1) - projection
    assert split.curl.item() ** 2 == pytest.approx((rest**2).sum().item() / energy, abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(n=SIZES, seed=SEEDS, scale=SCALES)
def test_columns_are_enough_for_a_causal_pattern(make_pattern, n, seed, scale):
    pattern = make_pattern(n, seed=seed, scale=scale, causal=True, lead=(2,))
    streamed = hodge_from_columns(
        pattern.sum(-2),
        pattern.square().sum((-2, -1)),
        pattern.diagonal(dim1=-2, dim2=-1).square().sum(-1),
    )
    for ours, theirs in zip(streamed, hodge_split(pattern), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7)


def test_column_form_ignores_rows_that_are_not_there(make_pattern):
    pattern = make_pattern(6, seed=3, causal=True)
    lengths = torch.tensor([2, 6])
    blocks = [pattern[:t, :t] for t in lengths]
    streamed = hodge_from_columns(
        torch.stack([torch.nn.functional.pad(b.sum(0), (0, 6 - len(b))) for b in blocks]),
        torch.stack([b.square().sum() for b in blocks]),
        torch.stack([b.diagonal().square().sum() for b in blocks]),
        lengths,
    )
    for row, block in enumerate(blocks):
        for ours, theirs in zip(streamed, hodge_split(block), strict=True):
            assert ours[row].item() == pytest.approx(theirs.item())


def lipschitz_functions():
    """Functions of a matrix with Lipschitz constant 1 in the Frobenius norm."""
    probe = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probe = probe / probe.norm()
    return {
        "second singular value": lambda x: torch.linalg.svdvals(x)[1],
        "norm": torch.linalg.matrix_norm,
        "first row": lambda x: x[0].norm(),
        "linear": lambda x: (probe * x).sum(),
    }


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, scale=SCALES, causal=st.booleans(), name=st.sampled_from(sorted(lipschitz_functions())))
def test_what_a_function_can_tell_about_orientation_is_bounded_by_asymmetry(make_pattern, seed, scale, causal, name):
    pattern = make_pattern(5, seed=seed, scale=scale, causal=causal)
    f = lipschitz_functions()[name]
    difference = (f(pattern) - f(pattern.T)).abs().item()
    assert difference <= 2 * pattern.norm().item() * asymmetry(pattern).item() + 1e-12


def test_singular_value_diagnostics_are_blind_to_orientation(make_pattern):
    # Doubly stochastic, so that the transpose is a pattern too.
    forward = doubly_stochastic(make_pattern(6, seed=4))
    backward = forward.T.contiguous()
    assert asymmetry(forward) > 0.1
    assert torch.allclose(tdo_spectrum(forward), tdo_spectrum(backward))
    assert participation_ratio(forward).item() == pytest.approx(participation_ratio(backward).item())
    capacity = spectral_capacity(forward)
    for ours, theirs in zip(capacity, spectral_capacity(backward), strict=True):
        assert ours.item() == pytest.approx(theirs.item())


def test_unknown_operator(make_pattern):
    with pytest.raises(ValueError, match="'pattern' or 'normalized'"):
        asymmetry(make_pattern(3), "laplacian")


@pytest.mark.parametrize("function", [asymmetry, hodge_split])
def test_cross_attention_has_no_direction(make_pattern, function):
    with pytest.raises(ValueError, match=r"cross-attention.*compares A with its transpose"):
        function(make_pattern(2, 3))
