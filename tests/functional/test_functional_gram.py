"""Prefix participation ratios: every leading block of a causal pattern, against the block alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import (
    leverage_scores,
    participation_ratio,
    prefix_participation_ratio,
    unembedding_measure,
    zipf_measure,
)

NAMED = ["intrinsic", "counting", "positional"]


def causal(n, *leading, seed=0, scale=2.0, window=None):
    """Random causal patterns in float64; with a window, old keys get no mass from late rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*leading, n, n, generator=generator, dtype=torch.float64) * scale
    row, key = torch.arange(n)[:, None], torch.arange(n)
    allowed = key <= row
    if window is not None:
        allowed &= key > row - window
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1)


def by_definition(a, mu_of):
    """(tr S)^2 / (n ||S||_F^2) of every leading block, S written out; `mu_of(block)` gives the key weights."""
    ratios = []
    for t in range(1, a.shape[-1] + 1):
        block = a[:t, :t]
        mu = mu_of(block)
        kept = (mu > 0) & (block.sum(0) > 0)
        half = block[:, kept] / mu[kept].sqrt()
        s = half.T @ half
        ratios.append(torch.trace(s) ** 2 / (t * (s * s).sum()))
    return torch.stack(ratios)


def uniform_mass(block):
    t = block.shape[0]
    uniform = torch.ones(t, t, dtype=torch.float64).tril() / torch.arange(1, t + 1)[:, None]
    return uniform.sum(0)


DEFINITIONS = {
    "intrinsic": lambda block: block.sum(0),
    "counting": lambda block: torch.ones(block.shape[0], dtype=torch.float64),
    "positional": uniform_mass,
}


@pytest.mark.parametrize("measure", NAMED)
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 63, 64, 65, 130])
def test_every_prefix_against_the_definition(measure, n):
    a = causal(n, seed=n)
    expected = by_definition(a, DEFINITIONS[measure])
    torch.testing.assert_close(prefix_participation_ratio(a, measure), expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("measure", NAMED)
def test_a_sliding_window_drops_keys_and_stays_exact(measure):
    a = causal(40, seed=1, window=4)
    expected = by_definition(a, DEFINITIONS[measure])
    torch.testing.assert_close(prefix_participation_ratio(a, measure), expected, rtol=1e-11, atol=0)


def test_keys_that_nobody_attends_to_are_outside():
    a = torch.zeros(20, 20, dtype=torch.float64)
    a[:, 0] = 1.0  # all to the first token: PR = 1/t at every prefix
    torch.testing.assert_close(prefix_participation_ratio(a), 1 / torch.arange(1.0, 21.0, dtype=torch.float64))


@given(n=st.integers(1, 40), seed=st.integers(0, 10_000), scale=st.floats(0.0, 30.0))
@settings(max_examples=30, deadline=None)
def test_the_last_prefix_is_the_whole_and_ratios_stay_in_range(n, seed, scale):
    a = causal(n, seed=seed, scale=scale)
    ratios = prefix_participation_ratio(a)
    torch.testing.assert_close(ratios[-1], participation_ratio(a), rtol=1e-10, atol=0)
    assert (ratios > 0).all()
    assert (ratios <= 1 + 1e-12).all()


def test_token_measures():
    a = causal(30, 2, seed=3)
    tokens = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(0))
    leverage = leverage_scores(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)))
    for mu in (zipf_measure(tokens), unembedding_measure(tokens, leverage)):
        ratios = prefix_participation_ratio(a, mu)
        for i in range(2):
            expected = by_definition(a[i], lambda block, i=i, mu=mu: mu[i, : block.shape[0]].double())
            torch.testing.assert_close(ratios[i], expected, rtol=1e-10, atol=0)


def test_leading_dimensions_are_kept():
    a = causal(12, 2, 3, seed=4)
    ratios = prefix_participation_ratio(a)
    assert ratios.shape == (2, 3, 12)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(ratios[i, j], prefix_participation_ratio(a[i, j]))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("measure", [*NAMED, "tensor"])
def test_padding_is_removed(side, measure):
    alone = causal(9, seed=5)
    padded = torch.zeros(13, 13, dtype=torch.float64)
    where = slice(4, None) if side == "left" else slice(9)
    padded[where, where] = alone
    mask = torch.zeros(13, dtype=torch.bool)
    mask[where] = True
    mu = torch.rand(13, generator=torch.Generator().manual_seed(6), dtype=torch.float64) + 0.1
    given_measure, alone_measure = (mu, mu[where]) if measure == "tensor" else (measure, measure)
    ratios = prefix_participation_ratio(padded, given_measure, mask=mask)
    torch.testing.assert_close(ratios[:9], prefix_participation_ratio(alone, alone_measure), rtol=1e-12, atol=0)
    assert ratios[9:].isnan().all()


def test_float32_stays_float32_and_close():
    a = causal(200, 3, seed=7)
    single = prefix_participation_ratio(a.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), prefix_participation_ratio(a), rtol=2e-5, atol=0)


def test_tiny_column_masses_do_not_overflow():
    a = torch.eye(10)
    a[5:, 2] = 1e-38
    assert prefix_participation_ratio(a).isfinite().all()


def test_what_is_no_causal_pattern_is_refused():
    with pytest.raises(ValueError, match=r"causal.*row 0, column 1"):
        prefix_participation_ratio(torch.full((2, 2), 0.5))
    with pytest.raises(ValueError, match="square"):
        prefix_participation_ratio(torch.full((2, 4), 0.25))
    with pytest.raises(ValueError, match="zipf_measure"):
        prefix_participation_ratio(torch.eye(3), "zipf")
    with pytest.raises(ValueError, match="'other' is unknown"):
        prefix_participation_ratio(torch.eye(3), "other")
