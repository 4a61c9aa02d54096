import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import attention_log_determinant

# Diagonals [layer, head, token] of random patterns, and what the published codes give for them: the features of
# LapEigvals (mean of log a_tt) [layer, head], and the attention score of LLM-Check (their sum over heads) [layer].
# fmt: off
DIAGONALS = [
    [
        [
            1.0, 0.7169408422146623, 0.2691969160830969, 0.3629007006758885, 0.11718001340595043,
            0.03252289406638289, 0.007482948758907064, 0.5966277921973544,
        ],
        [
            1.0, 0.15313936909922468, 0.4658072281440442, 0.01452567412744442, 0.8665132434006719,
            0.006650147309302403, 0.03630387747733302, 0.29305724631427504,
        ],
    ],
    [
        [
            1.0, 0.4583771040154067, 0.2930449694852575, 0.18020255935669485, 0.07641442412827928,
            0.03230923619996366, 0.009595642904547981, 0.01361951438040717,
        ],
        [
            1.0, 0.07263918879625952, 0.11876841891164523, 0.27383592484088853, 0.25580728446316137,
            0.4375710942603475, 0.19046445213362864, 0.009652499335607015,
        ],
    ],
    [
        [
            1.0, 0.025820026304017, 0.3454162099343342, 0.17282886362912883, 0.08681499414898074,
            0.028614168422255035, 0.05867974323714333, 0.003816850268550825,
        ],
        [
            1.0, 0.797794617992189, 0.5451528364521997, 0.0038578845657106222, 0.35905892417725455,
            0.03154236557792982, 0.021321077506827164, 0.14825818285720122,
        ],
    ],
]
FEATURES = [
    -1.7050181556044173, -2.071480003344351, -2.3334812149359214,
    -1.8170914652272117, -2.6096103884819923, -2.0784726395199975,
]
LLM_CHECK = [-3.776498158948768, -4.150572680163133, -4.68808302800199]
# fmt: on


def with_diagonal(diagonal):
    """A causal pattern with this diagonal; the rest of every row goes to the first key."""
    diagonal = torch.as_tensor(diagonal, dtype=torch.float64)
    pattern = torch.diag_embed(diagonal)
    pattern[..., 1:, 0] += 1 - diagonal[..., 1:]
    return pattern


def test_numbers_of_the_published_code():
    mean = attention_log_determinant(with_diagonal(DIAGONALS)) / 8
    assert mean.flatten().tolist() == pytest.approx(FEATURES, abs=1e-12)
    assert mean.sum(1).tolist() == pytest.approx(LLM_CHECK, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 9), seed=st.integers(0, 10_000), scale=st.sampled_from([0.0, 1.0, 4.0]))
def test_against_the_determinant(make_pattern, n, seed, scale):
    pattern = make_pattern(n, seed=seed, scale=scale, causal=True)
    found = attention_log_determinant(pattern).item()
    assert found == pytest.approx(torch.linalg.slogdet(pattern).logabsdet.item(), abs=1e-9)
    assert found <= 0
    with_epsilon = attention_log_determinant(pattern, 1e-2).item()
    assert with_epsilon == pytest.approx(sum(math.log(pattern[i, i].item() + 1e-2) for i in range(n)), abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 30])
def test_closed_forms(uniform_causal, n):
    assert attention_log_determinant(torch.eye(n, dtype=torch.float64)).item() == 0.0
    assert attention_log_determinant(uniform_causal(n)).item() == pytest.approx(-math.lgamma(n + 1), abs=1e-12)


def test_a_weight_of_zero():
    pattern = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert attention_log_determinant(pattern).item() == -math.inf
    assert attention_log_determinant(pattern, 1e-12).item() == pytest.approx(math.log(1e-12), rel=1e-6)


@pytest.mark.parametrize("epsilon", [-1e-12, math.nan, math.inf])
def test_an_epsilon_that_is_none(epsilon):
    with pytest.raises(ValueError, match="epsilon="):
        attention_log_determinant(torch.eye(2), epsilon)


def test_needs_a_causal_square_pattern(make_pattern):
    with pytest.raises(ValueError, match="causal"):
        attention_log_determinant(make_pattern(3))
    with pytest.raises(ValueError, match="what a token gives to itself"):
        attention_log_determinant(make_pattern(3, 2))
