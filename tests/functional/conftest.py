"""Patterns to test on. Session scope, so that hypothesis tests may use them."""

import pytest
import torch


@pytest.fixture(scope="session")
def make_pattern():
    """make_pattern(n_query, n_key, seed, lead=(), causal=False, scale=2.0, dtype=float64): rows sum to 1.

    `scale` is that of the scores: 0 is uniform, 2 is usual, 1000 is hard attention (one-hot rows).
    """

    def make(n_query, n_key=None, seed=0, *, lead=(), causal=False, scale=2.0, dtype=torch.float64):
        n_key = n_query if n_key is None else n_key
        generator = torch.Generator().manual_seed(seed)
        scores = scale * torch.randn(*lead, n_query, n_key, generator=generator, dtype=torch.float64)
        if causal:
            above = torch.ones(n_query, n_key, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(above, -torch.inf)
        if scale >= 1000:
            best = scores.argmax(-1)
            return torch.nn.functional.one_hot(best, n_key).to(dtype)
        return scores.softmax(-1).to(dtype)

    return make


@pytest.fixture(scope="session")
def uniform_causal():
    """uniform_causal(n): row i spreads its attention evenly over keys 1..i."""

    def make(n, dtype=torch.float64):
        ones = torch.ones(n, n, dtype=dtype).tril()
        return ones / ones.sum(-1, keepdim=True)

    return make


@pytest.fixture(scope="session")
def window_causal():
    """window_causal(n, w): row i spreads its attention evenly over the last w keys up to i."""

    def make(n, width, dtype=torch.float64):
        ones = torch.ones(n, n, dtype=dtype).tril().triu(1 - width)
        return ones / ones.sum(-1, keepdim=True)

    return make


@pytest.fixture(scope="session")
def pad_pattern():
    """pad_pattern(pattern, left, right): the pattern with padded tokens, whose rows are NaN, and its mask."""

    def make(pattern, left, right):
        n = pattern.shape[-1]
        total = left + n + right
        padded = torch.full((*pattern.shape[:-2], total, total), torch.nan, dtype=pattern.dtype)
        padded[..., left : left + n, :] = 0.0
        padded[..., left : left + n, left : left + n] = pattern
        mask = torch.zeros(total, dtype=torch.bool)
        mask[left : left + n] = True
        return padded, mask

    return make
