"""Row and column sums in tiles, against sums written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import sums as sums_module
from attnprobe.functional.sums import pattern_sums


def written_out(pattern, own):
    """The definitions, entry by entry in float64."""
    pattern = pattern.double()
    others = pattern.clone()
    if own is not None:
        for sequence, row in torch.cartesian_prod(*(torch.arange(size) for size in own.shape)).tolist():
            if own[sequence, row] >= 0:
                others[sequence, :, row, own[sequence, row]] = 0.0
    return pattern.sum(-1), pattern.min(-1).values, pattern.sum(-2), (others * others).sum(-2)


@settings(deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 7),
    n_query=st.integers(1, 90),
    more=st.integers(0, 40),
    entries=st.sampled_from([1, 64, 1000, 1 << 18]),
    rows=st.sampled_from([1, 3, 32]),
    seed=st.integers(0, 99),
)
def test_tiles_of_any_size_give_the_sums_of_the_whole(batch, heads, n_query, more, entries, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(batch, heads, n_query, n_query + more, generator=generator).softmax(-1)
    own = torch.arange(more, more + n_query).repeat(batch, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums_module, "_TILE_ENTRIES", entries)
        patch.setattr(sums_module, "_TILE_ROWS", rows)
        found = pattern_sums(pattern, own)
    for value, expected in zip(found, written_out(pattern, own), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=2e-6, atol=1e-12)


def test_without_own_tokens_every_square_counts():
    pattern = torch.rand(2, 3, 11, 11, dtype=torch.float64)
    for value, expected in zip(pattern_sums(pattern), written_out(pattern, None), strict=True):
        torch.testing.assert_close(value, expected)


def test_what_heads_that_look_at_themselves_give_to_others_is_not_drowned():
    pattern = torch.eye(4)[None, None] * (1 - 3e-6) + 1e-6 * (1 - torch.eye(4))
    energy = pattern_sums(pattern, torch.arange(4)[None]).energy
    torch.testing.assert_close(energy, torch.full((1, 1, 4), 3e-12), rtol=1e-5, atol=0)


def test_padded_rows_add_nothing():
    pattern = torch.tensor([[0.0, 0.0], [1.0, 0.0]])[None, None]
    found = pattern_sums(pattern, torch.tensor([[-1, 0]]))
    assert found.row.tolist() == [[[0.0, 1.0]]]
    assert found.mass.tolist() == [[[1.0, 0.0]]]
    assert found.energy.tolist() == [[[0.0, 0.0]]]


def test_a_number_that_is_none_and_a_negative_one_are_seen_in_their_row():
    pattern = torch.full((1, 2, 3, 4), 0.25)
    pattern[0, 1, 2, 3] = torch.nan
    pattern[0, 0, 1, 0] = -0.5
    found = pattern_sums(pattern)
    assert found.row.isnan().nonzero().tolist() == [[0, 1, 2]]
    assert (found.least < 0).nonzero().tolist() == [[0, 0, 1]]


def test_no_keys_and_no_rows_have_sums_of_zero():
    assert pattern_sums(torch.zeros(1, 2, 3, 0)).row.tolist() == [[[0.0] * 3] * 2]
    assert pattern_sums(torch.zeros(1, 2, 0, 3)).mass.tolist() == [[[0.0] * 3] * 2]
