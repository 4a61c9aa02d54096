import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.functional import recurrent_confidence, recurrent_log_confidence


def random_steps(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, *shape, generator=generator, dtype=torch.float64).to(dtype)


@settings(max_examples=30, deadline=None)
@given(steps=st.integers(1, 12), seed=st.integers(0, 10_000), alpha=st.floats(0, 1))
def test_against_the_recurrence(steps, seed, alpha):
    probability, signal = random_steps(steps, seed=seed)
    expected = [probability[0].item()]
    for t in range(1, steps):
        expected.append(alpha * probability[t].item() + (1 - alpha) * signal[t].item() * expected[-1])
    confidence = recurrent_confidence(probability, signal, alpha)
    assert confidence.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-300)
    assert ((confidence >= 0) & (confidence <= 1 + 1e-12)).all()
    log = recurrent_log_confidence(probability.log(), signal, alpha)
    assert torch.allclose(log.exp(), confidence)


def test_default_alpha_is_a_fifth():
    confidence = recurrent_confidence(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]))
    assert confidence[1].item() == pytest.approx(0.2 * 0.5 + 0.8 * 0.5)


def test_first_signal_is_not_used():
    probability, signal = random_steps(5, seed=1)
    reference = recurrent_confidence(probability, signal)
    for value in (torch.nan, -1.0, 7.0, torch.inf):
        signal[0] = value
        assert torch.equal(recurrent_confidence(probability, signal), reference)


def test_tiny_probabilities_are_finite_numbers():
    probability = torch.full((4,), 1e-40, dtype=torch.float64)
    confidence = recurrent_confidence(probability, torch.ones(4).double())
    assert confidence.tolist() == pytest.approx([1e-40] * 4)
    log = recurrent_log_confidence(torch.full((3,), -1e5), torch.zeros(3))
    assert log.dtype == torch.float32
    assert log.tolist() == pytest.approx([-1e5, -1e5 + math.log(0.2), -1e5 + math.log(0.2)])


def test_float32_probabilities_keep_their_precision_through_the_logarithm():
    probability = torch.logspace(-1, -30, 20).unsqueeze(-1)
    confidence = recurrent_confidence(probability, torch.ones(20, 1))
    assert confidence.flatten().tolist() == pytest.approx(probability.flatten().tolist(), rel=3e-7)


def test_zero_probability_and_nothing_carried_over_is_zero_confidence():
    confidence = recurrent_confidence(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.0, 0.0, 1.0]))
    assert confidence.tolist() == pytest.approx([1.0, 0.0, 0.1])
    log = recurrent_log_confidence(torch.tensor([-torch.inf, -torch.inf]), torch.zeros(2))
    assert log.tolist() == [-torch.inf, -torch.inf]


def test_extreme_alphas():
    probability, signal = random_steps(4, seed=2)
    assert torch.allclose(recurrent_confidence(probability, signal, 1.0), probability)
    signal[0] = 1.0
    assert torch.allclose(recurrent_confidence(probability, signal, 0.0), probability[0] * signal.cumprod(0))


def test_log_form_takes_what_is_not_a_probability():
    # RAUQ with entropy puts log|V| - H in place of p: it can be above 1.
    log = recurrent_log_confidence(torch.tensor([2.0, 1.0]), torch.tensor([0.0, 1.0]), 0.8)
    assert log[1].item() == pytest.approx(math.log(0.8 * math.e + 0.2 * math.e**2))


def test_leading_dimensions_are_broadcast():
    probability = random_steps(3, 1, 6, seed=3)[0]
    signal = random_steps(4, 6, seed=4)[0]
    confidence = recurrent_confidence(probability, signal)
    assert confidence.shape == (3, 4, 6)
    for i in range(3):
        for j in range(4):
            assert torch.allclose(confidence[i, j], recurrent_confidence(probability[i, 0], signal[j]))


@pytest.mark.parametrize(
    ("dtype", "out"),
    [(torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_dtypes(dtype, out):
    probability, signal = random_steps(8, seed=5)
    confidence = recurrent_confidence(probability.to(dtype), signal.to(dtype))
    assert confidence.dtype == out
    tolerance = {torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    assert torch.allclose(confidence.double(), recurrent_confidence(probability, signal), atol=tolerance)


def test_inputs_are_left_alone():
    probability, signal = random_steps(5, seed=6)
    before = probability.clone(), signal.clone()
    recurrent_confidence(probability, signal)
    assert torch.equal(probability, before[0])
    assert torch.equal(signal, before[1])


def test_rounding_above_one_is_accepted():
    recurrent_confidence(torch.tensor([1.0000001, 1.0]), torch.tensor([0.0, 1.0000005]))


@pytest.mark.parametrize(
    ("probability", "signal", "alpha", "error", "sentence"),
    [
        ([0.5, 0.5], [0.0, 1.0], 1.5, ValueError, r"alpha must lie in \[0, 1\]"),
        ([0.5, 0.5], [0.0, 1.0], math.nan, ValueError, r"alpha must lie in \[0, 1\]"),
        ([0.5, 1.5], [0.0, 1.0], 0.2, ValueError, "probability must lie"),
        ([0.5, -0.1], [0.0, 1.0], 0.2, ValueError, "probability must lie"),
        ([math.nan, 0.5], [0.0, 1.0], 0.2, ValueError, "probability must lie"),
        ([0.5, 0.5], [0.0, 1.1], 0.2, ValueError, "signal must lie"),
        ([0.5, 0.5], [0.0, math.nan], 0.2, ValueError, "signal must lie"),
        ([0.5, 0.5], [0.0, -0.1], 0.2, ValueError, "signal must lie"),
        ([0.5, 0.5], [1.0], 0.2, ValueError, "same number of steps, but they have 2 and 1"),
        ([[0.5], [0.5]], [[1.0], [1.0], [1.0]], 0.2, ValueError, "cannot be broadcast"),
        ([], [], 0.2, ValueError, "at least one step"),
    ],
)
def test_refusals(probability, signal, alpha, error, sentence):
    with pytest.raises(error, match=sentence):
        recurrent_confidence(torch.tensor(probability), torch.tensor(signal), alpha)


def test_wrong_types():
    with pytest.raises(TypeError, match="probability must be a floating-point tensor"):
        recurrent_confidence([0.5], torch.ones(1))
    with pytest.raises(TypeError, match=r"signal must be .* not torch\.int64"):
        recurrent_confidence(torch.ones(1), torch.ones(1, dtype=torch.int64))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_log_probability_must_be_below_infinity(value):
    with pytest.raises(ValueError, match="finite or -inf"):
        recurrent_log_confidence(torch.tensor([value]), torch.ones(1))
