import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import participation_ratio, positional_measure, tdo_matrix, tdo_spectrum

SIZES = st.integers(1, 8)
SEEDS = st.integers(0, 10_000)
SCALES = st.sampled_from([0.0, 1.0, 3.0, 12.0, 1000.0])


def weights_of(pattern, measure):
    """(pi, mu) written out from the table of measures."""
    n, n_key = pattern.shape
    if measure == "counting":
        return 1.0, torch.ones(n_key, dtype=pattern.dtype)
    if measure == "positional":
        mu = [sum(1 / i for i in range(j, n + 1)) / n for j in range(1, n + 1)]
        return 1 / n, torch.tensor(mu, dtype=torch.float64)
    if measure == "intrinsic":
        return 1 / n, pattern.sum(0) / n
    return 1 / n, measure


def dense_matrix(pattern, measure="intrinsic"):
    """S by its definition with loops, on the keys inside the space only."""
    pi, mu = weights_of(pattern, measure)
    n_query, n_key = pattern.shape
    s = torch.zeros(n_key, n_key, dtype=torch.float64)
    for j in range(n_key):
        for k in range(n_key):
            if mu[j] > 0 and mu[k] > 0:
                total = sum(pi * pattern[i, j].item() * pattern[i, k].item() for i in range(n_query))
                s[j, k] = total / math.sqrt(mu[j] * mu[k])
    return s


def dense_ratio(pattern, measure="intrinsic"):
    s = dense_matrix(pattern, measure)
    return (s.trace() ** 2 / (pattern.shape[0] * (s**2).sum())).item()


GIVEN = torch.tensor([0.3, 0.1, 0.2, 0.15, 0.25], dtype=torch.float64)


@pytest.mark.parametrize("measure", ["intrinsic", "counting", "positional", GIVEN])
def test_against_the_dense_definition(make_pattern, measure):
    for seed in range(3):
        pattern = make_pattern(5, seed=seed, causal=True)
        s = dense_matrix(pattern, measure)
        assert torch.allclose(tdo_matrix(pattern, measure), s)
        assert participation_ratio(pattern, measure).item() == pytest.approx(dense_ratio(pattern, measure))
        expected = torch.linalg.eigvalsh(s).flip(-1)
        assert torch.allclose(tdo_spectrum(pattern, measure=measure), expected, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 6), (6, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("measure", ["intrinsic", "counting"])
def test_rectangular_patterns(make_pattern, shape, measure):
    pattern = make_pattern(*shape, seed=4)
    s = dense_matrix(pattern, measure)
    assert participation_ratio(pattern, measure).item() == pytest.approx(dense_ratio(pattern, measure))
    spectrum = tdo_spectrum(pattern, measure=measure)
    assert spectrum.shape == (shape[1],)
    assert torch.allclose(spectrum, torch.linalg.eigvalsh(s).flip(-1).clamp(min=0), atol=1e-12)


def test_spectrum_takes_the_k_largest(make_pattern):
    pattern = make_pattern(7, seed=5, lead=(2,))
    assert torch.equal(tdo_spectrum(pattern, k=3), tdo_spectrum(pattern)[..., :3])
    for k in (0, 8):
        with pytest.raises(ValueError, match=rf"1\.\.7, the number of keys, but it is {k}"):
            tdo_spectrum(pattern, k=k)


@settings(max_examples=30, deadline=None)
@given(n=SIZES, n_key=SIZES, seed=SEEDS, scale=SCALES)
def test_constant_function_is_the_first_eigenvector(make_pattern, n, n_key, seed, scale):
    pattern = make_pattern(n, n_key, seed, scale=scale)
    mu = pattern.sum(0) / n
    inside = (mu > 0).double()
    d = (inside / mu.where(mu > 0, 1.0))[:, None] * (pattern.T @ pattern) / n
    # D in L2(mu) from the symmetric form that the library returns.
    root = mu.sqrt()
    s = tdo_matrix(pattern)
    assert torch.allclose(root[:, None] * d, s * root[None, :], atol=1e-10)
    assert torch.allclose(s @ root, root, atol=1e-10)
    assert torch.allclose(d @ torch.ones_like(mu), inside, atol=1e-10)
    assert torch.allclose(mu @ d, mu, atol=1e-10)
    spectrum = tdo_spectrum(pattern)
    assert spectrum[0].item() == pytest.approx(1.0, abs=1e-10)
    assert spectrum.max() <= 1 + 1e-10
    assert spectrum.min() >= 0
    assert (spectrum.diff() <= 0).all()


@settings(max_examples=30, deadline=None)
@given(n=SIZES, n_key=SIZES, seed=SEEDS, scale=SCALES)
def test_attention_contracts_functions_of_the_keys(make_pattern, n, n_key, seed, scale):
    pattern = make_pattern(n, n_key, seed, scale=scale)
    f = torch.randn(n_key, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mu = pattern.sum(0) / n
    before, after = (mu * f**2).sum(), ((pattern @ f) ** 2).mean()
    assert after <= before + 1e-12
    # The quadratic form of S is what attention leaves: f^T Omega^1/2 S Omega^1/2 f = ||A f||_pi^2.
    g = mu.sqrt() * f
    assert (g @ tdo_matrix(pattern) @ g).item() == pytest.approx(after.item(), abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(n=SIZES, seed=SEEDS, scale=SCALES, measure=st.sampled_from(["intrinsic", "counting", "positional"]))
def test_participation_ratio_is_a_fraction(make_pattern, n, seed, scale, measure):
    pattern = make_pattern(n, seed=seed, scale=scale, causal=True)
    ratio = participation_ratio(pattern, measure).item()
    assert 0 < ratio <= 1
    assert ratio == pytest.approx(dense_ratio(pattern, measure), rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(n=SIZES, n_key=SIZES, seed=SEEDS, causal=st.booleans())
def test_hard_attention_counts_distinct_keys(make_pattern, n, n_key, seed, causal):
    pattern = make_pattern(n, n_key, seed, scale=1000.0, causal=causal)
    distinct = len(set(pattern.argmax(-1).tolist()))
    assert participation_ratio(pattern).item() == pytest.approx(distinct / n)
    s = tdo_matrix(pattern)
    assert torch.allclose(s @ s, s, atol=1e-12)


def shift_map(n):
    shift = torch.zeros(n, n, dtype=torch.float64)
    shift[0, 0] = 1.0
    shift[torch.arange(1, n), torch.arange(n - 1)] = 1.0
    return shift


def sink_map(n):
    sink = torch.zeros(n, n, dtype=torch.float64)
    sink[:, 0] = 1.0
    return sink


def test_copy_sink_and_shift_maps():
    n = 16
    assert participation_ratio(torch.eye(n).double()).item() == pytest.approx(1.0)
    assert participation_ratio(sink_map(n)).item() == pytest.approx(1 / n)
    assert participation_ratio(shift_map(n)).item() == pytest.approx((n - 1) / n)


def test_intrinsic_geometry_sees_through_a_sink():
    biased = 0.7 * sink_map(256) + 0.3 * shift_map(256)
    assert participation_ratio(biased).item() == pytest.approx(0.972, abs=5e-4)
    assert participation_ratio(biased, "counting").item() == pytest.approx(0.0054, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_never_takes_the_ratio_above_one(dtype):
    ratios = [participation_ratio(torch.eye(n, dtype=dtype)).item() for n in range(1, 40)]
    assert max(ratios) == 1.0
    assert min(ratios) > 1 - 1e-6


def test_keys_without_weight_are_dropped(make_pattern):
    pattern = make_pattern(5, 4, seed=6)
    weights = torch.tensor([0.3, 0.0, 0.3, 0.4], dtype=torch.float64)
    kept = [0, 2, 3]
    s = tdo_matrix(pattern, weights)
    assert s[1].abs().sum() == 0
    assert s[:, 1].abs().sum() == 0
    assert torch.allclose(s[kept][:, kept], dense_matrix(pattern[:, kept], weights[kept]))


def test_unattended_keys_change_nothing(make_pattern):
    pattern = make_pattern(4, 3, seed=7)
    wider = torch.cat([pattern, torch.zeros(4, 2, dtype=torch.float64)], -1)
    assert participation_ratio(wider).item() == pytest.approx(participation_ratio(pattern).item())
    assert torch.allclose(tdo_spectrum(wider, k=3), tdo_spectrum(pattern))


def test_a_measure_without_weight_on_any_attended_key_has_no_ratio():
    assert participation_ratio(sink_map(3), torch.tensor([0.0, 1.0, 1.0])).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_masses_and_weights_stay_finite(dtype):
    tiny = 1e-42 if dtype == torch.float32 else 1e-310
    pattern = torch.tensor([[1.0, tiny], [1.0, tiny]], dtype=dtype)
    assert participation_ratio(pattern).item() == pytest.approx(0.5)
    assert tdo_spectrum(pattern).tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    weights = torch.tensor([1e-30, 1e-30], dtype=dtype)
    assert participation_ratio(torch.eye(2, dtype=dtype), weights).item() == pytest.approx(1.0)


def test_ratio_does_not_see_the_scale_of_the_measure_but_the_spectrum_does(make_pattern):
    pattern = make_pattern(5, seed=8, causal=True)
    mu = positional_measure(5)
    ratio = participation_ratio(pattern, mu).item()
    assert participation_ratio(pattern, 10 * mu).item() == pytest.approx(ratio)
    assert torch.allclose(tdo_spectrum(pattern, measure=10 * mu), tdo_spectrum(pattern, measure=mu) / 10)
