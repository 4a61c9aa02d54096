import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import routing_split, split_from_moments, tdo_spectrum

SIZES = st.integers(1, 7)
SEEDS = st.integers(0, 10_000)
SCALES = st.sampled_from([0.0, 1.0, 4.0, 1000.0])


def make_values(n_key, d, seed, offset=0.0, lead=()):
    generator = torch.Generator().manual_seed(seed)
    return offset + torch.randn(*lead, n_key, d, generator=generator, dtype=torch.float64)


def dense_split(pattern, values):
    """m, V_c and the energies by their definitions, with loops."""
    n, n_key = pattern.shape
    mu = [sum(pattern[i, j].item() for i in range(n)) / n for j in range(n_key)]
    mean = sum(mu[j] * values[j] for j in range(n_key))
    centered = values - mean
    rows = [sum(pattern[i, j] * centered[j] for j in range(n_key)) for i in range(n)]
    routed = sum((row @ row).item() for row in rows) / n
    value = sum(mu[j] * (centered[j] @ centered[j]).item() for j in range(n_key))
    return (mean @ mean).item(), routed, value


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3), (1, 5)])
def test_against_the_dense_definition(make_pattern, shape):
    pattern, values = make_pattern(*shape, seed=1), make_values(shape[1], 3, 2, offset=0.5)
    mean, routed, value = dense_split(pattern, values)
    split = routing_split(pattern, values)
    assert split.mean_energy.item() == pytest.approx(mean)
    assert split.routed_energy.item() == pytest.approx(routed)
    assert split.value_energy.item() == pytest.approx(value)
    assert split.routed_fraction.item() == pytest.approx(routed / (mean + routed))
    assert split.gain.item() == pytest.approx((routed / value) ** 0.5)
    assert split.bound.item() == pytest.approx(tdo_spectrum(pattern)[1].item() ** 0.5, abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(n=SIZES, n_key=SIZES, d=st.integers(1, 4), seed=SEEDS, scale=SCALES, offset=st.floats(-5, 5))
def test_parts_are_orthogonal_and_contracted(make_pattern, n, n_key, d, seed, scale, offset):
    pattern, values = make_pattern(n, n_key, seed, scale=scale), make_values(n_key, d, seed, offset)
    split = routing_split(pattern, values)
    output = pattern @ values
    # Orthogonality in L2(pi): the energies of the parts add up to the energy of the output.
    whole = output.square().sum(-1).mean().item()
    assert split.mean_energy.item() + split.routed_energy.item() == pytest.approx(whole, abs=1e-12)
    assert split.gain <= split.bound + 1e-7
    assert split.routed_energy <= split.bound**2 * split.value_energy + 1e-9
    assert 0 <= split.routed_fraction <= 1
    assert split.bound <= 1 + 1e-9


@settings(max_examples=30, deadline=None)
@given(n=SIZES, d=st.integers(1, 4), seed=SEEDS, scale=SCALES)
def test_streaming_moments_give_the_same_split(make_pattern, n, d, seed, scale):
    pattern, values = make_pattern(n, seed=seed, scale=scale, causal=True), make_values(n, d, seed)
    z = pattern @ values
    mean = z.mean(0)
    streamed = split_from_moments(
        mean,
        (z - mean).square().sum(-1).mean(),
        (pattern.sum(0) / n * values.square().sum(-1)).sum(),
        tdo_spectrum(pattern)[1] if n > 1 else torch.zeros(()).double(),
    )
    for ours, theirs in zip(routing_split(pattern, values), streamed, strict=True):
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-7)


def test_copy_keeps_everything_and_sink_routes_nothing():
    values = make_values(5, 3, 3)
    copy = routing_split(torch.eye(5).double(), values)
    assert copy.gain.item() == pytest.approx(1.0)
    assert copy.bound.item() == pytest.approx(1.0)
    sink = torch.zeros(5, 5).double()
    sink[:, 0] = 1
    split = routing_split(sink, values)
    assert split.routed_energy.item() == pytest.approx(0.0, abs=1e-12)
    assert split.gain.item() == 0.0
    assert split.mean_energy.item() == pytest.approx(values[0].square().sum().item())


def test_no_energy_at_all_has_fraction_and_gain_zero(make_pattern):
    split = routing_split(make_pattern(3), torch.zeros(3, 2).double())
    assert split.routed_fraction.item() == 0.0
    assert split.gain.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_have_no_gain_in_any_precision(make_pattern, dtype):
    for seed in range(20):
        pattern, values = make_pattern(6, seed=seed, dtype=dtype), torch.full((6, 4), 1.7, dtype=dtype)
        assert routing_split(pattern, values).gain.item() == 0.0
        z = pattern @ values
        streamed = split_from_moments(
            z.mean(0),
            (z - z.mean(0)).square().sum(-1).mean(),
            (pattern.mean(0) * values.square().sum(-1)).sum(),
            torch.ones((), dtype=dtype),
        )
        assert streamed.gain.item() == 0.0


def test_large_common_offset_does_not_drown_the_routed_part(make_pattern):
    pattern, values = make_pattern(6, seed=4), make_values(6, 3, 5)
    reference = routing_split(pattern, values)
    shifted = routing_split(pattern, values + 1e5)
    assert shifted.routed_energy.item() == pytest.approx(reference.routed_energy.item(), rel=1e-7)
    assert shifted.gain.item() == pytest.approx(reference.gain.item(), rel=1e-3)


def test_half_precision_rows_do_not_leak_the_mean_into_the_value_energy(make_pattern):
    pattern, values = make_pattern(40, seed=4), 30 + make_values(40, 3, 5)
    exact = routing_split(pattern, values)
    rounded = routing_split(pattern.bfloat16(), values)
    assert rounded.value_energy.item() == pytest.approx(exact.value_energy.item(), rel=0.02)
    assert rounded.routed_energy.item() == pytest.approx(exact.routed_energy.item(), rel=0.1)


def test_unknown_lambda_leaves_the_rest():
    split = split_from_moments(torch.ones(2), torch.tensor(1.0), torch.tensor(4.0), torch.tensor(torch.nan))
    assert split.bound.isnan()
    assert split.gain.item() == pytest.approx(0.5**0.5)


def test_sink_key_has_value_zero(make_pattern):
    pattern, values = 0.5 * make_pattern(4, seed=6), make_values(4, 3, 7)
    completed = torch.cat([torch.full((4, 1), 0.5).double(), pattern], -1)
    expected = routing_split(completed, torch.cat([torch.zeros(1, 3).double(), values]))
    for ours, theirs in zip(routing_split(pattern, values, rows="sink"), expected, strict=True):
        assert ours.item() == pytest.approx(theirs.item())


def test_shared_values_are_broadcast(make_pattern):
    pattern, values = make_pattern(4, lead=(2, 3)), make_values(4, 2, 8, lead=(2, 1))
    split = routing_split(pattern, values)
    assert split.gain.shape == (2, 3)
    alone = routing_split(pattern[1, 2], values[1, 0])
    assert split.gain[1, 2].item() == pytest.approx(alone.gain.item())


@pytest.mark.parametrize(
    ("values", "error", "sentence"),
    [
        (torch.ones(3, 2), ValueError, "each of the 4 keys"),
        (torch.ones(5, 4, 2), ValueError, "repeat shared key/value heads"),
        (torch.ones(4), ValueError, r"\[\.\.\., key, d\]"),
        (torch.full((4, 2), torch.nan), ValueError, "NaN"),
        (torch.ones(4, 2, dtype=torch.int64), TypeError, "floating-point"),
        (None, TypeError, "NoneType"),
    ],
)
def test_values_that_do_not_fit(make_pattern, values, error, sentence):
    with pytest.raises(error, match=sentence):
        routing_split(make_pattern(4, lead=(3,)), values)
