"""Duplicate-token and induction scores: closed forms, theorems, and loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import duplicate_token_score, induction_score

SCORES = {"duplicate": (duplicate_token_score, 0), "induction": (induction_score, 1)}
BOTH = pytest.mark.parametrize("name", SCORES)


def by_loops(pattern, tokens, shift):
    values = []
    for i, row in enumerate(pattern.tolist()):
        earlier = [j for j in range(i) if tokens[j] == tokens[i]]
        if earlier:
            values.append(sum(row[j + shift] for j in earlier))
    return sum(values) / len(values) if values else math.nan


@BOTH
@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(0, 4), min_size=1, max_size=10), seed=st.integers(0, 10_000), causal=st.booleans())
def test_it_is_what_loops_find(make_pattern, name, ids, seed, causal):
    score, shift = SCORES[name]
    pattern = make_pattern(len(ids), seed=seed, causal=causal)
    found = score(pattern, torch.tensor(ids)).item()
    assert found == pytest.approx(by_loops(pattern, ids, shift), abs=1e-12, nan_ok=True)
    renamed = torch.tensor([97 - 7 * token for token in ids])  # only which tokens are the same matters
    assert score(pattern, renamed).item() == pytest.approx(found, nan_ok=True)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(2, 10), seed=st.integers(0, 10_000))
def test_one_token_again_and_again(make_pattern, n, seed):
    """All earlier keys hold the token, and all keys but the first follow one."""
    pattern, tokens = make_pattern(n, seed=seed, causal=True), torch.zeros(n).long()
    own, first = pattern.diagonal()[1:], pattern[1:, 0]
    assert duplicate_token_score(pattern, tokens).item() == pytest.approx((1 - own).mean().item())
    assert induction_score(pattern, tokens).item() == pytest.approx((1 - first).mean().item())


@pytest.mark.parametrize("m", [1, 2, 7])
def test_heads_that_do_nothing_else(m):
    """On a text read twice: one head looks at the token's first occurrence, one at what followed it."""
    n, tokens = 2 * m, torch.arange(m).repeat(2)
    duplicating = torch.eye(n)
    inducing = torch.eye(n)
    for i in range(m, n):
        duplicating[i] = torch.nn.functional.one_hot(torch.tensor(i - m), n)
        inducing[i] = torch.nn.functional.one_hot(torch.tensor(i - m + 1), n)
    assert duplicate_token_score(duplicating, tokens).item() == 1.0
    assert induction_score(inducing, tokens).item() == 1.0
    assert duplicate_token_score(inducing, tokens).item() == 0.0
    assert induction_score(duplicating, tokens).item() == 0.0


@BOTH
def test_no_token_twice(name, make_pattern):
    score, _ = SCORES[name]
    assert score(make_pattern(6, causal=True), torch.arange(6)).isnan()


@BOTH
def test_tokens_of_each_sequence_or_of_all(name, make_pattern, pad_pattern):
    score, _ = SCORES[name]
    pattern, tokens = make_pattern(7, seed=1, lead=(2, 3), causal=True), torch.tensor([[1, 2, 1, 1, 3, 2, 1]] * 2)
    tokens[1] = tokens[1].flip(0)
    found = score(pattern, tokens[:, None])
    assert found.shape == (2, 3)
    for i in range(2):
        torch.testing.assert_close(found[i], score(pattern[i], tokens[i]))
    # ids of padding are not looked at, though they are those of tokens here
    padded, mask = pad_pattern(pattern, 2, 1)
    wide = torch.full((2, 1, 10), 1)
    wide[..., 2:9] = tokens[:, None]
    torch.testing.assert_close(score(padded, wide, mask=mask), found)


@BOTH
def test_what_is_refused(name, make_pattern):
    score, _ = SCORES[name]
    with pytest.raises(ValueError, match="among the keys before its query"):
        score(make_pattern(2, 3), torch.arange(3))
    with pytest.raises(ValueError, match="do not fit a pattern"):
        score(make_pattern(3), torch.arange(4))
    with pytest.raises(TypeError, match=r"token ids, not torch\.float32"):
        score(make_pattern(3), torch.zeros(3))
    with pytest.raises(TypeError, match="token ids, not list"):
        score(make_pattern(3), [1, 2, 3])
