import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import entropy_bound, entropy_from_moments, routing_split, spectral_entropy


def make_values(n_key, d, seed, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    return offset + torch.randn(n_key, d, generator=generator, dtype=torch.float64)


def dense_entropy(matrix):
    energy = [s**2 for s in torch.linalg.svdvals(matrix).tolist()]
    total = sum(energy)
    if total == 0:
        return 0.0
    return -sum(e / total * math.log(e / total) for e in energy if e > 0)


@pytest.mark.parametrize("shape", [(5, 5, 3), (3, 6, 8), (6, 2, 4), (1, 4, 2)])
def test_against_the_singular_values_of_the_output(make_pattern, shape):
    n, n_key, d = shape
    pattern, values = make_pattern(n, n_key, seed=1), make_values(n_key, d, 2, 0.4)
    output = pattern @ values / n**0.5
    mean = output.mean(0)
    bound = entropy_bound(pattern, values)
    assert bound.entropy.item() == pytest.approx(dense_entropy(output), abs=1e-10)
    if n > 1:
        assert bound.centered_entropy.item() == pytest.approx(dense_entropy(output - mean), abs=1e-10)
    alpha = ((output - mean).square().sum() / output.square().sum()).item()
    assert bound.routed_fraction.item() == pytest.approx(alpha, abs=1e-12)
    assert bound.routed_fraction.item() == pytest.approx(routing_split(pattern, values).routed_fraction.item())
    binary = -sum(p * math.log(p) for p in (alpha, 1 - alpha) if p > 1e-300)
    assert bound.lower.item() == pytest.approx(alpha * bound.centered_entropy.item())
    assert bound.upper.item() == pytest.approx(binary + bound.lower.item(), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 7),
    n_key=st.integers(1, 7),
    d=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 1.0, 4.0, 1000.0]),
    offset=st.floats(-4, 4),
)
def test_both_bounds_hold(make_pattern, n, n_key, d, seed, scale, offset):
    pattern, values = make_pattern(n, n_key, seed, scale=scale), make_values(n_key, d, seed, offset)
    bound = entropy_bound(pattern, values)
    assert bound.lower <= bound.entropy + 1e-9
    assert bound.entropy <= bound.upper + 1e-9
    assert 0 <= bound.entropy <= math.log(min(n, d)) + 1e-9 or min(n, d) == 1
    assert 0 <= bound.routed_fraction <= 1


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 7), d=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_moments_of_the_rows_give_the_same_bound(make_pattern, n, d, seed):
    pattern, values = make_pattern(n, seed=seed, causal=True), make_values(n, d, seed, 1.0)
    z = pattern @ values
    mean = z.mean(0)
    covariance = sum(torch.outer(row - mean, row - mean) for row in z) / n
    for ours, theirs in zip(entropy_bound(pattern, values), entropy_from_moments(mean, covariance), strict=True):
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-9)


def test_no_energy_has_no_entropy(make_pattern):
    bound = entropy_bound(make_pattern(3), torch.zeros(3, 2).double())
    assert [field.item() for field in bound] == [0.0] * 5


def test_bounds_meet_when_nothing_is_the_mean():
    values = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).double()
    bound = entropy_bound(torch.eye(4).double(), values)
    for field in (bound.entropy, bound.lower, bound.upper):
        assert field.item() == pytest.approx(math.log(2))


def test_spectral_entropy_closed_forms():
    energies = torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0], [0.0] * 4, [3.0, 1.0, 0.0, 0.0]]).double()
    quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert spectral_entropy(energies).tolist() == pytest.approx([math.log(4), 0.0, 0.0, quarter])


@pytest.mark.parametrize("bad", [-1.0, torch.nan, torch.inf])
def test_spectral_entropy_refuses(bad):
    with pytest.raises(ValueError, match="finite and not negative"):
        spectral_entropy(torch.tensor([1.0, bad]))


def test_sink_key_has_value_zero(make_pattern):
    pattern, values = 0.5 * make_pattern(4, seed=6), make_values(4, 3, 7)
    completed = torch.cat([torch.full((4, 1), 0.5).double(), pattern], -1)
    expected = entropy_bound(completed, torch.cat([torch.zeros(1, 3).double(), values]))
    for ours, theirs in zip(entropy_bound(pattern, values, rows="sink"), expected, strict=True):
        assert ours.item() == pytest.approx(theirs.item())
