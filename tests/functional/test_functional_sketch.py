"""The sketched participation ratio: unbiased, with a standard error that is true, and its definition by brute force."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import participation_ratio, sketched_participation_ratio
from attnprobe.functional.sketch import (
    SignSketch,
    ratio_of_square,
    sign_block,
    sketch_of,
    sketched_square,
)

RANK = 32


def causal(n, *leading, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*leading, n, n, generator=generator, dtype=torch.float64) * scale
    return logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def maps(n):
    """Patterns whose participation ratio is known: hard attention has (distinct keys)/n."""
    sink = torch.zeros(n, n, dtype=torch.float64)
    sink[:, 0] = 1
    shift = torch.eye(n, dtype=torch.float64).roll(1, 0)
    shift[0] = sink[0]
    few = torch.zeros(n, n, dtype=torch.float64)
    few[torch.arange(n), torch.arange(n) // 4] = 1
    return {"copy": torch.eye(n, dtype=torch.float64), "sink": sink, "shift": shift, "few": few}


def realistic(n):
    """Heads of the kinds that models have."""
    near = torch.arange(n, dtype=torch.float64)
    window = (-(near[:, None] - near).abs() / 3).masked_fill(near > near[:, None], -torch.inf).softmax(-1)
    known = maps(n)
    return {
        "sharp": causal(n, seed=1, scale=4.0),
        "flat": causal(n, seed=2, scale=1.0),
        "window": window,
        "sink-biased": 0.6 * known["sink"] + 0.2 * known["shift"] + 0.2 * causal(n, seed=5),
        "half a sink": 0.5 * known["sink"] + 0.5 * causal(n, seed=3, scale=3.0),
        "few keys": 0.9 * known["few"] + 0.1 * causal(n, seed=4),
    }


def exact(a, weights):
    """K and tr K, ||K||_F^2, literally."""
    k = a @ torch.diag(weights) @ a.T
    return k, k.trace(), k.square().sum()


def key_weights(a, measure):
    mass = a.sum(0)
    return torch.where(mass > 0, 1 / mass, 0.0) if measure == "intrinsic" else torch.ones_like(mass)


def square_of(a, rank, seed, measure="intrinsic"):
    weights = key_weights(a, measure)
    n = a.shape[0]
    sketch = sketch_of(a, torch.arange(n), rank, seed)
    return sketched_square(sketch, a.sum(0), torch.tensor(n), weights, (a.square().sum(0) * weights).sum())


@functools.cache
def over_seeds(name, n, rank, measure="intrinsic", seeds=300):
    """Relative errors of the estimate and relative standard errors, over many seeds."""
    a = realistic(n)[name]
    weights = key_weights(a, measure)
    signs = torch.stack([sign_block(torch.arange(n), rank, seed, dtype=a.dtype) for seed in range(seeds)])
    sketch = SignSketch(signs @ a, signs.sum(-1), signs @ signs.mT)
    _, trace, square = exact(a, weights)
    mass = a.sum(0).expand(seeds, -1)
    found = sketched_square(sketch, mass, torch.tensor(n), weights.expand(seeds, -1), trace.expand(seeds))
    return found.square / square - 1, found.standard_error / square


# -- signs -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    positions=st.lists(st.integers(0, 10**12), min_size=1, max_size=20),
    rank=st.integers(1, 200),
    seed=st.integers(0, 2**70),
    data=st.data(),
)
def test_the_signs_of_a_position_do_not_depend_on_what_is_asked_beside_it(positions, rank, seed, data):
    together = sign_block(torch.tensor(positions), rank, seed)
    assert together.shape == (rank, len(positions))
    assert (together.abs() == 1).all()
    i = data.draw(st.integers(0, len(positions) - 1))
    batch = torch.tensor([[-1, positions[i], -1], [positions[i], -1, 7]])
    alone = sign_block(batch, rank + 70, seed)  # a larger rank goes on where a smaller one ends
    assert torch.equal(alone[0, :rank, 1], together[:, i])
    assert torch.equal(alone[1, :rank, 0], together[:, i])
    assert (alone[0, :, [0, 2]] == 0).all()


def test_signs_are_independent_of_one_another():
    """Means and products of any two sign rows or positions are those of coin tosses."""
    n, rank = 4096, 192
    signs = torch.cat([sign_block(torch.arange(n), rank // 2, 0), sign_block(torch.arange(n), rank // 2, 1)])
    rows = signs @ signs.mT / n**0.5
    rows = rows[~torch.eye(rank, dtype=torch.bool)]
    shifts = [(signs[:, lag:] * signs[:, :-lag]).sum(-1) / (n - lag) ** 0.5 for lag in (1, 2, 3, 64, 256, 1024)]
    for scaled in (signs.sum(-1) / n**0.5, signs.sum(0) / rank**0.5, rows, torch.cat(shifts)):
        assert scaled.std().item() == pytest.approx(1, abs=4 / len(scaled) ** 0.5)
        assert scaled.abs().max() < 5.5
    triples = (signs[0] * signs[1:-1] * signs[2:]).sum(-1) / n**0.5
    assert triples.std().item() == pytest.approx(1, abs=4 / rank**0.5)


# -- the estimator, by brute force -------------------------------------------------------------------------


def remainder(a, rank, seed, measure):
    """Pi P (K - m) P Pi^T and Pi P K u, from dense matrices; the exact part and the number it is left with."""
    n = a.shape[0]
    k, trace, _ = exact(a, key_weights(a, measure))
    u = torch.full((n, 1), n**-0.5, dtype=a.dtype)
    p = torch.eye(n, dtype=a.dtype) - u @ u.T
    first = (u.T @ k @ u).item()
    mean = (trace - first) / (n - 1)
    pi = sign_block(torch.arange(n), rank, seed, dtype=a.dtype)
    z = pi @ p @ (k - mean * torch.eye(n, dtype=a.dtype)) @ p @ pi.T
    return z, (pi @ p @ k @ u).squeeze(-1), first**2 + (n - 1) * mean**2


def added_by_row(z, along):
    r = len(along)
    off = z.square() - torch.diag(z.diagonal().square())
    return 2 * off.sum(-1) / (r - 1) + 2 * along.square()


def mean_square(z, along):
    r = len(along)
    off = z.square() - torch.diag(z.diagonal().square())
    return off.sum() / (r * (r - 1)) + 2 * along.square().mean()


def slope(z, along):
    x, y = z.diagonal(), added_by_row(z, along)
    return ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()


def left_out(z, along, i):
    keep = torch.arange(len(along)) != i
    return z[keep][:, keep], along[keep]


def pairwise_variance(z):
    """Variance that comes from the part of Z_ab^2 which row effects do not explain, by least squares."""
    r = len(z)
    i, j = torch.triu_indices(r, r, 1)
    design = torch.zeros(len(i), r, dtype=z.dtype)
    design[torch.arange(len(i)), i] = design[torch.arange(len(i)), j] = 1.0
    value = z[i, j].square()
    fit = torch.linalg.lstsq(design, value[:, None]).solution
    spread = (value - (design @ fit).squeeze(-1)).square().sum() / (r * (r - 3) / 2)
    return spread * 2 / (r * (r - 1))


@pytest.mark.parametrize("measure", ["intrinsic", "counting"])
@pytest.mark.parametrize("name", ["sharp", "window", "half a sink"])
@pytest.mark.parametrize("rank", [16, 33])
def test_the_estimate_and_its_error_equal_their_definition(measure, name, rank):
    a = realistic(21)[name]
    z, along, known = remainder(a, rank, 5, measure)
    slopes = [slope(*left_out(z, along, i)) for i in range(rank)]
    estimate = mean_square(z, along) - (torch.stack(slopes) * z.diagonal()).mean()
    without = torch.stack(
        [
            mean_square(*left_out(z, along, i)) - slopes[i] * left_out(z, along, i)[0].diagonal().mean()
            for i in range(rank)
        ]
    )
    jackknife = (without - without.mean()).square().sum() * (rank - 1) / rank
    pairwise = pairwise_variance(z)
    by_row = (jackknife - 2 * (rank - 1) / (rank - 2) * pairwise).clamp_min(0)
    found = square_of(a, rank, 5, measure)
    assert found.square.item() == pytest.approx((known + estimate.clamp_min(0)).item(), rel=1e-10)
    student = rank / (rank - 4)
    assert found.standard_error.item() == pytest.approx((student * (by_row + pairwise)).sqrt().item(), rel=1e-8)


def test_the_constant_function_is_an_eigenvector_that_needs_no_estimate():
    """K 1 = 1, so it is left out exactly; what is sketched is Pi (K - u u^T) Pi^T less m times the signs."""
    a = realistic(40)["sharp"]
    n = len(a)
    k, trace, _ = exact(a, key_weights(a, "intrinsic"))
    torch.testing.assert_close(k.sum(0), torch.ones(n, dtype=a.dtype))
    z, along, known = remainder(a, RANK, 0, "intrinsic")
    assert along.abs().max() < 1e-12
    assert known == pytest.approx((1 + (trace - 1) ** 2 / (n - 1)).item())
    pi = sign_block(torch.arange(n), RANK, dtype=a.dtype)
    centred = pi - pi.mean(-1, keepdim=True)
    beside = pi @ (k - 1 / n) @ pi.T - (trace - 1) / (n - 1) * centred @ centred.T
    torch.testing.assert_close(z, beside, rtol=1e-10, atol=1e-10)


# -- the estimator, over its signs -------------------------------------------------------------------------

NAMES = list(realistic(4))


@pytest.mark.parametrize("measure", ["intrinsic", "counting"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "rank"), [(5, 16), (60, 16), (60, 48)])
def test_the_estimate_is_unbiased(measure, name, n, rank):
    error, _ = over_seeds(name, n, rank, measure)
    assert error.mean().abs() <= 3.5 * error.std() / len(error) ** 0.5 + 1e-12


@pytest.mark.parametrize("measure", ["intrinsic", "counting"])
@pytest.mark.parametrize(("n", "rank"), [(5, 16), (5, 48), (60, 16), (60, 48), (150, 48)])
def test_the_standard_error_is_true(measure, n, rank):
    """Over six kinds of heads and 300 seeds each: one standard error covers about 68 %, two about 95 %."""
    inside = []
    for name in NAMES:
        error, standard_error = over_seeds(name, n, rank, measure)
        inside.append(torch.stack([(error.abs() <= k * standard_error).double().mean() for k in (1, 2)]))
        # the claimed and the real spread of one kind of head; sixteen rows have long tails
        claimed = standard_error.square().mean().sqrt() / error.square().mean().sqrt()
        assert 0.85 < claimed < (1.5 if rank == 16 else 1.3)
    one, two = torch.stack(inside).mean(0).tolist()
    assert len(inside) == len(NAMES)
    assert 0.66 <= one <= 0.76
    assert 0.925 <= two <= 0.975


def plain(a, rank, seeds):
    """The mean of (Pi K Pi^T)_ab^2 over a != b: nothing deflated, nothing known."""
    k, _, square = exact(a, key_weights(a, "intrinsic"))
    pi = torch.stack([sign_block(torch.arange(len(a)), rank, seed, dtype=a.dtype) for seed in range(seeds)])
    m = (pi @ k @ pi.mT).square()
    off = m.sum((-2, -1)) - m.diagonal(dim1=-2, dim2=-1).sum(-1)
    return off / (rank * (rank - 1)) / square - 1


@pytest.mark.parametrize("name", NAMES)
def test_what_is_known_exactly_takes_error_away(name):
    error, _ = over_seeds(name, 60, 48)
    naive = plain(realistic(60)[name], 48, 300)
    assert error.square().mean().sqrt() < 0.6 * naive.square().mean().sqrt()


@pytest.mark.parametrize("name", ["sharp", "flat", "half a sink"])
def test_the_error_falls_with_the_rank(name):
    small, large = (over_seeds(name, 150, rank, seeds=100)[0].square().mean().sqrt() for rank in (16, 64))
    assert 2 < small / large < 6.5  # between 1/sqrt(rank) and 1/rank


# -- closed cases ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 40, 300])
def test_maps_with_a_known_ratio(n, dtype):
    for name, a in maps(n).items():
        found = sketched_participation_ratio(a.to(dtype), RANK)
        ratio, error = (value.item() for value in found)
        known = a.sum(0).count_nonzero().item() / n
        if name in ("copy", "sink") or n <= 2:
            assert ratio == pytest.approx(known, rel=1e-6)
            assert error < (1e-6 if dtype == torch.float64 else 1e-4)
        assert abs(ratio - known) <= 4 * error + 1e-5
        assert 0 < ratio <= 1 + 1e-6


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [0.0, 2.0, 1000.0])
def test_one_and_two_tokens_are_exact(seed, scale):
    for n in (1, 2):
        a = causal(n, 3, seed=seed, scale=scale)
        found = sketched_participation_ratio(a, 16, seed)
        torch.testing.assert_close(found.participation_ratio, participation_ratio(a), rtol=1e-10, atol=1e-10)
        assert (found.standard_error < 1e-9).all()


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 30),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 0.3, 2.0, 8.0, 1000.0]),
    measure=st.sampled_from(["intrinsic", "counting", "positional"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_every_ratio_is_a_fraction_near_the_exact_one(n, seed, scale, measure, dtype):
    a = causal(n, seed=seed, scale=scale).to(dtype)
    found = sketched_participation_ratio(a, 64, seed, measure)
    assert found.participation_ratio.dtype == found.standard_error.dtype == dtype
    assert 0 < found.participation_ratio <= 1 + 1e-6
    assert found.standard_error >= 0
    error = found.participation_ratio - participation_ratio(a, measure)
    assert error.abs() <= 6.5 * found.standard_error + 0.02 * found.participation_ratio


def test_columns_that_nothing_reaches_or_that_underflow_are_dropped():
    a = causal(30, seed=2, scale=3.0)
    a[:, 5] = 0.0
    a[5:, 7] = 0.0
    a[7, 7] = torch.finfo(torch.float64).tiny / 16
    a = a / a.sum(-1, keepdim=True)
    found = sketched_participation_ratio(a, RANK)
    without = sketched_participation_ratio(a[:, torch.arange(30) != 7], RANK)
    torch.testing.assert_close(found, without, rtol=1e-10, atol=1e-12)
    assert (found.participation_ratio - participation_ratio(a)).abs() < 4 * found.standard_error


# -- what every function of a pattern promises -------------------------------------------------------------


def test_leading_dimensions_share_the_signs_and_are_kept():
    a = causal(25, 2, 3, seed=4)
    together = sketched_participation_ratio(a, RANK)
    for i in range(2):
        for j in range(3):
            alone = sketched_participation_ratio(a[i, j], RANK)
            for field, value in zip(together, alone, strict=True):
                assert field[i, j].item() == pytest.approx(value.item(), rel=1e-10)
    assert sketched_participation_ratio(torch.zeros(0, 2, 4, 4)).standard_error.shape == (0, 2)


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 3), (2, 2)])
@pytest.mark.parametrize("measure", ["intrinsic", "positional", "tensor"])
def test_padding_changes_nothing(make_pattern, pad_pattern, measure, left, right):
    a = make_pattern(12, seed=3, lead=(2,), causal=True)
    padded, mask = pad_pattern(a, left, right)
    given_measure = torch.linspace(1, 2, 12).double() if measure == "tensor" else measure
    wide = torch.full((left + 12 + right,), torch.nan).double()
    wide[mask] = torch.linspace(1, 2, 12).double()
    found = sketched_participation_ratio(padded, RANK, 1, wide if measure == "tensor" else measure, mask=mask)
    torch.testing.assert_close(found, sketched_participation_ratio(a, RANK, 1, given_measure), rtol=1e-10, atol=1e-12)


def test_row_policies():
    a = causal(12, seed=4)
    block = a * torch.linspace(0.4, 1, 12).double()[:, None]
    found = sketched_participation_ratio(block, RANK, rows="renormalize")
    torch.testing.assert_close(found, sketched_participation_ratio(a, RANK))
    completed = torch.cat([1 - block.sum(-1, keepdim=True), block], -1)
    found = sketched_participation_ratio(block, RANK, rows="sink")
    torch.testing.assert_close(found, sketched_participation_ratio(completed, RANK))
    with pytest.raises(ValueError, match="must sum to 1"):
        sketched_participation_ratio(block, RANK)


@pytest.mark.parametrize("shape", [(3, 9), (9, 3), (1, 5), (40, 2)])
def test_rectangular_patterns(make_pattern, shape):
    a = make_pattern(*shape, seed=7)
    found = sketched_participation_ratio(a, 64)
    assert (found.participation_ratio - participation_ratio(a)).abs() <= 4 * found.standard_error + 1e-9


def test_a_given_measure():
    a = causal(40, seed=8)
    mu = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.01
    found = sketched_participation_ratio(a, 64, 0, mu)
    assert (found.participation_ratio - participation_ratio(a, mu)).abs() <= 4 * found.standard_error
    for scale in (1e-9, 1e9):  # a measure has no unit
        torch.testing.assert_close(sketched_participation_ratio(a, 64, 0, scale * mu), found, rtol=1e-9, atol=1e-12)
    never = torch.zeros(4, dtype=torch.float64)
    never[3] = 1.0
    sink = maps(4)["sink"]
    assert participation_ratio(sink, never).isnan()
    assert sketched_participation_ratio(sink, RANK, 0, never).participation_ratio.isnan()


@pytest.mark.parametrize("measure", ["intrinsic", "counting"])
def test_float32_is_as_good(measure):
    for a in realistic(300).values():
        double = sketched_participation_ratio(a, RANK, 2, measure)
        single = sketched_participation_ratio(a.float(), RANK, 2, measure)
        torch.testing.assert_close(single.participation_ratio.double(), double.participation_ratio, rtol=2e-4, atol=0)
        torch.testing.assert_close(single.standard_error.double(), double.standard_error, rtol=2e-3, atol=1e-6)


def test_the_seed_decides_the_signs():
    a = causal(40, seed=1)
    first, again, other = (sketched_participation_ratio(a, RANK, seed).participation_ratio for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_nothing_is_modified_and_there_is_a_gradient():
    a = causal(10, seed=1)
    before = a.clone()
    sketched_participation_ratio(a, 16)
    assert torch.equal(a, before)
    scores = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.autograd.gradcheck(lambda x: sketched_participation_ratio(x.softmax(-1), 16).participation_ratio, (scores,))


def test_the_ratio_has_the_relative_error_of_the_square():
    a = realistic(60)["flat"]
    found = square_of(a, RANK, 0)
    _, trace, _ = exact(a, key_weights(a, "intrinsic"))
    ratio = ratio_of_square(trace, torch.tensor(60), found)
    assert ratio.participation_ratio.item() == pytest.approx((trace**2 / (60 * found.square)).item())
    relative = (found.standard_error / found.square).item()
    assert (ratio.standard_error / ratio.participation_ratio).item() == pytest.approx(relative)


@pytest.mark.parametrize("rank", [0, 1, 15, -3, 16.0, True, "128", None])
def test_wrong_ranks(rank):
    with pytest.raises(ValueError, match=r"rank=.* at least 16"):
        sketched_participation_ratio(torch.eye(3), rank)


@pytest.mark.parametrize("seed", [-1, 0.5, None, True])
def test_wrong_seeds(seed):
    with pytest.raises(ValueError, match=r"seed=.* 0 or more"):
        sketched_participation_ratio(torch.eye(3), 16, seed)


def test_wrong_measures_and_patterns():
    with pytest.raises(ValueError, match="unknown"):
        sketched_participation_ratio(torch.eye(3), 16, 0, "zip")
    with pytest.raises(ValueError, match="zipf_measure"):
        sketched_participation_ratio(torch.eye(3), 16, 0, "zipf")
    with pytest.raises(ValueError, match="square"):
        sketched_participation_ratio(torch.full((2, 4), 0.25), 16, 0, "positional")
    with pytest.raises(ValueError, match="all-zero row"):
        sketched_participation_ratio(torch.zeros(3, 3), 16)
