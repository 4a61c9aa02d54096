import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import (
    capacity_from_columns,
    landscape_from_columns,
    prefix_capacity,
    prefix_landscape,
    spectral_capacity,
    tdo_spectrum,
    threshold_capacity,
)

SEEDS = st.integers(0, 10_000)
SCALES = st.sampled_from([0.0, 1.0, 4.0, 20.0, 1000.0])


def conductance(pattern, queries, keys):
    """phi of one cut, straight from the definition; None where one side has no volume."""
    n_query, n_key = pattern.shape
    cut = inside = outside = 0.0
    for i in range(n_query):
        for j in range(n_key):
            mass = pattern[i, j].item()
            cut += mass * ((i in queries) != (j in keys))
            inside += mass * ((i in queries) + (j in keys))
            outside += mass * ((i not in queries) + (j not in keys))
    return cut / min(inside, outside) if min(inside, outside) > 0 else None


def exact_conductance(pattern):
    """The minimum over all cuts, by enumeration."""
    n_query, n_key = pattern.shape
    bits = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n_query + n_key)), dtype=torch.float64)
    q, k = bits[:, :n_query], bits[:, n_query:]
    cut = ((q @ pattern) * (1 - k) + ((1 - q) @ pattern) * k).sum(-1)
    inside = q @ pattern.sum(-1) + k @ pattern.sum(-2)
    outside = (1 - q) @ pattern.sum(-1) + (1 - k) @ pattern.sum(-2)
    smaller = torch.minimum(inside, outside)
    return (cut[smaller > 1e-12] / smaller[smaller > 1e-12]).min().item()


def test_enumeration_agrees_with_the_definition(make_pattern):
    pattern = make_pattern(2, 3, seed=0)
    subsets = [
        conductance(pattern, set(q), set(k))
        for a in range(3)
        for q in itertools.combinations(range(2), a)
        for b in range(4)
        for k in itertools.combinations(range(3), b)
    ]
    assert exact_conductance(pattern) == pytest.approx(min(phi for phi in subsets if phi is not None))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 7), seed=SEEDS, scale=SCALES, causal=st.booleans())
def test_landscape_is_the_conductance_of_time_cuts(make_pattern, n, seed, scale, causal):
    pattern = make_pattern(n, seed=seed, scale=scale, causal=causal)
    expected = [conductance(pattern, set(range(t)), set(range(t))) for t in range(1, n)]
    assert prefix_landscape(pattern).tolist() == pytest.approx(expected, abs=1e-12)
    capacity = prefix_capacity(pattern)
    if n == 1:
        assert capacity.phi.isnan()
        assert capacity.cut.isnan()
    else:
        assert capacity.phi.item() == pytest.approx(min(expected), abs=1e-12)
        where = round(capacity.cut.item() * n)
        assert expected[where - 1] == pytest.approx(min(expected), abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 9), seed=SEEDS, scale=SCALES)
def test_columns_are_enough_for_a_causal_pattern(make_pattern, n, seed, scale):
    pattern = make_pattern(n, seed=seed, scale=scale, causal=True, lead=(2,))
    mass = pattern.sum(-2)
    assert torch.allclose(landscape_from_columns(mass), prefix_landscape(pattern), atol=1e-12)
    ours, theirs = capacity_from_columns(mass), prefix_capacity(pattern)
    assert torch.allclose(ours.phi, theirs.phi, equal_nan=True, atol=1e-12)
    if n > 1:
        worst = prefix_landscape(pattern)[range(2), (ours.cut * n).round().long() - 1]
        assert torch.allclose(worst, theirs.phi, atol=1e-12)


def test_column_form_of_prefixes_of_different_length(make_pattern):
    pattern = make_pattern(6, seed=1, causal=True)
    lengths = torch.tensor([1, 3, 6])
    masses = torch.stack([torch.nn.functional.pad(pattern[:t, :t].sum(0), (0, 6 - t)) for t in lengths])
    landscape = landscape_from_columns(masses, lengths)
    capacity = capacity_from_columns(masses, lengths)
    assert landscape.isnan().tolist() == [[t >= length for t in range(1, 6)] for length in (1, 3, 6)]
    assert capacity.phi[0].isnan()
    assert capacity.cut[0].isnan()
    for row, t in ((1, 3), (2, 6)):
        alone = prefix_capacity(pattern[:t, :t])
        assert torch.allclose(landscape[row, : t - 1], prefix_landscape(pattern[:t, :t]))
        assert capacity.phi[row].item() == pytest.approx(alone.phi.item())
        assert capacity.cut[row].item() == pytest.approx(alone.cut.item())


def test_ties_go_to_the_smallest_cut():
    capacity = prefix_capacity(torch.eye(4).double())
    assert (capacity.phi.item(), capacity.cut.item()) == (0.0, 0.25)
    threshold = threshold_capacity(torch.eye(4).double())
    assert [field.item() for field in threshold] == [0.0, 0.25, 0.25]


def test_uniform_causal_attention(uniform_causal):
    uniform = uniform_causal(1000)
    prefix = prefix_capacity(uniform)
    assert prefix.cut.item() == pytest.approx(0.3178, abs=1e-3)
    assert prefix.phi.item() == pytest.approx(0.3643, abs=1e-3)
    # The worst place is the root of 2x + x ln(1/x) = 1, where the two sides have the same volume.
    x = prefix.cut.item()
    assert 2 * x + x * math.log(1 / x) == pytest.approx(1.0, abs=5e-3)
    threshold = threshold_capacity(uniform)
    assert threshold.phi.item() == pytest.approx(0.248, abs=1e-3)
    spectral = spectral_capacity(uniform)
    assert spectral.sigma2.item() ** 2 == pytest.approx(0.495, abs=1e-3)
    assert min(prefix.phi, threshold.phi, spectral.sweep) > 0.2


@pytest.mark.parametrize("width", [2, 5, 8])
def test_window_attention_pierces_the_floor(window_causal, width):
    n = 1000
    capacity = prefix_capacity(window_causal(n, width))
    assert capacity.phi.item() == pytest.approx((width - 1) / (2 * n), rel=0.02)
    assert capacity.cut.item() == pytest.approx(0.5, abs=0.01)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 5), n_key=st.integers(1, 5), seed=SEEDS, scale=SCALES)
def test_threshold_capacity_is_the_best_of_all_threshold_cuts(make_pattern, n, n_key, seed, scale):
    pattern = make_pattern(n, n_key, seed, scale=scale)
    cuts = {(a, b): conductance(pattern, set(range(a)), set(range(b))) for a in range(n + 1) for b in range(n_key + 1)}
    best = min(phi for phi in cuts.values() if phi is not None)
    capacity = threshold_capacity(pattern)
    assert capacity.phi.item() == pytest.approx(best, abs=1e-12)
    place = round(capacity.query_cut.item() * n), round(capacity.key_cut.item() * n_key)
    assert cuts[place] == pytest.approx(best, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 6), n_key=st.integers(1, 6), seed=SEEDS, scale=SCALES, causal=st.booleans())
def test_bracket_and_sweep_against_the_exact_conductance(make_pattern, n, n_key, seed, scale, causal):
    pattern = make_pattern(n, n_key, seed, scale=scale, causal=causal)
    exact = exact_conductance(pattern)
    capacity = spectral_capacity(pattern)
    assert capacity.lower <= exact + 1e-9
    assert exact <= capacity.sweep + 1e-9
    assert capacity.sweep <= capacity.upper + 1e-7
    assert threshold_capacity(pattern).phi >= exact - 1e-9
    if n == n_key > 1:
        assert prefix_capacity(pattern).phi >= threshold_capacity(pattern).phi - 1e-12


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 7), n_key=st.integers(1, 7), seed=SEEDS, scale=SCALES)
def test_sigma2_is_the_second_singular_value(make_pattern, n, n_key, seed, scale):
    pattern = make_pattern(n, n_key, seed, scale=scale)
    mass = pattern.sum(0)
    kept = pattern[:, mass > 0] / mass[mass > 0].sqrt()
    sigma = torch.linalg.svdvals(kept)
    second = sigma[1].item() if len(sigma) > 1 else 0.0
    capacity = spectral_capacity(pattern)
    assert capacity.sigma2.item() == pytest.approx(second, abs=1e-9)
    assert capacity.lower.item() == pytest.approx((1 - second) / 2, abs=1e-9)
    assert capacity.upper.item() ** 2 == pytest.approx(2 * (1 - second), abs=1e-9)
    if n_key > 1:
        assert capacity.sigma2.item() ** 2 == pytest.approx(tdo_spectrum(pattern)[1].item(), abs=1e-9)


def dense_sweep(pattern):
    """The sweep written out: all cuts between neighbours in the order of the second singular vectors."""
    n_query = len(pattern)
    row, column = pattern.sum(1), pattern.sum(0)
    left, _, right = torch.linalg.svd(pattern / row.sqrt()[:, None] / column.sqrt())
    position = torch.cat([left[:, 1] / row.sqrt(), right[1] / column.sqrt()])
    order = position.argsort().tolist()
    sides = [order[:p] for p in range(1, len(order))]
    cuts = [
        conductance(pattern, {v for v in side if v < n_query}, {v - n_query for v in side if v >= n_query})
        for side in sides
    ]
    return min(cuts)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 6), n_key=st.integers(2, 6), seed=SEEDS, scale=st.sampled_from([0.1, 0.5, 2.0]))
def test_sweep_follows_the_second_singular_vectors(make_pattern, n, n_key, seed, scale):
    pattern = make_pattern(n, n_key, seed, scale=scale)
    assert spectral_capacity(pattern).sweep.item() == pytest.approx(dense_sweep(pattern))


def test_two_islands_have_a_free_cut(make_pattern):
    islands = torch.block_diag(make_pattern(3, seed=2), make_pattern(4, seed=3))
    shuffled = islands[torch.randperm(7, generator=torch.Generator().manual_seed(0))]
    capacity = spectral_capacity(shuffled)
    assert capacity.sigma2.item() == pytest.approx(1.0)
    assert capacity.sweep.item() == pytest.approx(0.0, abs=1e-9)


def test_sweep_finds_a_planted_cut_that_no_threshold_can(make_pattern):
    n = 24
    side = torch.arange(n) % 2
    same = (side[:, None] == side).double()
    planted = 0.02 + same
    planted = planted / planted.sum(-1, keepdim=True)
    phi = 0.02 / (1.02 + 0.02)
    assert spectral_capacity(planted).sweep.item() == pytest.approx(phi)
    assert threshold_capacity(planted).phi > 10 * phi


def test_single_token():
    capacity = spectral_capacity(torch.ones(1, 1).double())
    assert [field.item() for field in capacity] == pytest.approx([0.0, 0.5, 2**0.5, 1.0])
    assert [field.item() for field in threshold_capacity(torch.ones(1, 1))] == [1.0, 0.0, 1.0]
    assert prefix_landscape(torch.ones(3, 1, 1)).shape == (3, 0)


def test_keys_of_tiny_or_no_mass_do_not_break_the_cuts(make_pattern):
    pattern = make_pattern(5, 4, seed=5)
    nothing = torch.zeros(5, 1).double()
    dust = torch.full((5, 1), 1e-200).double()
    reference = threshold_capacity(pattern), spectral_capacity(pattern)
    for column in (nothing, dust):
        wider = torch.cat([column, pattern, column], -1)
        assert threshold_capacity(wider).phi.item() == pytest.approx(reference[0].phi.item())
        assert spectral_capacity(wider).sigma2.item() == pytest.approx(reference[1].sigma2.item())
        assert spectral_capacity(wider).sweep.item() == pytest.approx(reference[1].sweep.item())


def test_sink_joins_as_the_first_key(make_pattern):
    pattern = 0.5 * make_pattern(4, seed=6)
    completed = torch.cat([torch.full((4, 1), 0.5).double(), pattern], -1)
    for function in (threshold_capacity, spectral_capacity):
        for ours, theirs in zip(function(pattern, rows="sink"), function(completed), strict=True):
            assert ours.item() == pytest.approx(theirs.item())


@pytest.mark.parametrize("function", [prefix_landscape, prefix_capacity])
def test_time_cuts_need_a_square_pattern(make_pattern, function):
    with pytest.raises(ValueError, match=r"2 queries and 3 keys .*a time cut splits"):
        function(make_pattern(2, 3))
