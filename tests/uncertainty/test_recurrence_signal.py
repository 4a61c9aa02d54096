"""A routing signal of the user's own: the recurrence is one, the signal is the part that is swapped."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import tiny_bridge, tiny_model
from uncertainty import dense

import attnprobe as ap
from attnprobe.uncertainty import Assessment, Evidence, Method, Recurrent

PROMPTS = [[5, 9, 23, 44, 8, 61, 12, 17], [11, 6, 15, 9]]


class RowPeak(ap.Analyzer):
    """The largest weight of each row: a user's own analyzer."""

    def update(self, rows):
        self.accumulate(peak=rows.pattern.amax(-1).sum(-1), rows=rows.count[:, None])

    def compute(self):
        return {"row_peak": self.total["peak"] / self.total["rows"]}

    def trace_rows(self, rows):
        return {"row_peak": rows.pattern.amax(-1)}


class PeakUQ(Recurrent):
    """A user's own score: the signal is the peak of the row that chose the token, head 2 everywhere."""

    name = "PeakUQ"

    def analyzers(self):
        return [RowPeak(trace=True)]

    def signals(self, evidence, layers):
        return evidence.trace("row_peak", layers)[..., : evidence.n_tokens]

    def choose_heads(self, evidence, layers):
        return np.full(len(layers), 2)


class LongestDoubt(Method):
    """A user's own score without layers: the least probable token."""

    name = "LongestDoubt"

    def assess(self, evidence):
        return Assessment(float(-evidence.log_probability.min()))


@pytest.fixture(scope="module")
def model():
    return tiny_bridge("llama")


def expected_of(score, layers, alpha: float = 0.2) -> tuple[float, list[dense.Layer]]:
    text = dense.read_text(tiny_model("llama"), score.prompt_ids, score.token_ids)
    weight = np.exp(dense.token_log_probabilities(text))
    found = []
    for layer in layers:
        rows = [text.last_row(t) for t in range(1, text.n_tokens + 1)]
        signal = np.array([text.attention[layer, 2, row].max() for row in rows])
        confidence = dense.recurrence(weight, signal, alpha)
        found.append(dense.Layer(layer, 2, 1 - float(np.log(confidence).mean()), signal, confidence))
    return max(layer.uncertainty for layer in found), found


def test_a_custom_signal_through_score(model):
    scores = ap.score(model, PROMPTS, methods=["SAUQ", PeakUQ()], max_new_tokens=7)
    for score in scores:
        uncertainty, layers = expected_of(score, [1, 2])
        assert score.uncertainty["PeakUQ"] == pytest.approx(uncertainty, abs=1e-4)
        assert score.uncertainty["PeakUQ"] != pytest.approx(score.uncertainty["SAUQ"], abs=1e-3)
        dense.assert_same_layers(score.assessments["PeakUQ"], layers, 1e-4)


def test_its_alpha_and_layers(model):
    method = PeakUQ(alpha=0.6, layers=[0, 2])
    (score,) = ap.score(model, PROMPTS[0], methods=method, max_new_tokens=5)
    uncertainty, layers = expected_of(score, [0, 2], alpha=0.6)
    assert score.uncertainty["PeakUQ"] == pytest.approx(uncertainty, abs=1e-4)
    dense.assert_same_layers(score.assessments["PeakUQ"], layers, 1e-4)


def test_it_composes_with_a_probe_of_the_user(model):
    method = PeakUQ()
    probe = ap.Probe([*method.analyzers(), ap.TransportCapacity()], layers="all", logits=True)
    with probe.attach(model):
        model.generate(
            torch.tensor(PROMPTS[:1]),
            max_new_tokens=5,
            do_sample=False,
            stop_at_eos=False,
            return_type="tokens",
            verbose=False,
        )
    (assessment,) = method.score(probe)
    (score,) = ap.score(model, PROMPTS[0], methods=PeakUQ(), max_new_tokens=5)
    assert assessment.uncertainty == pytest.approx(score.uncertainty["PeakUQ"], abs=1e-5)
    assert "phi" in probe.results()


def test_a_method_without_layers(model):
    (score,) = ap.score(model, PROMPTS[0], methods=[LongestDoubt(), "Perplexity"], max_new_tokens=5)
    assert score.uncertainty["LongestDoubt"] == pytest.approx(-score.tokens["log_probability"].min())
    assert score.uncertainty["LongestDoubt"] > score.uncertainty["Perplexity"]
    assert score.assessments["LongestDoubt"].layers == ()
    assert score.assessments["LongestDoubt"].deciding is None
    assert score.assessments["LongestDoubt"].table().empty
    assert "confidence" not in score.tokens
    with pytest.raises(ValueError, match=r"no layers.*none"):
        score.layers()
    with pytest.raises(ValueError, match="token probabilities only"):
        LongestDoubt().probe()


def test_a_method_that_forgot_its_name_or_its_score_says_so(model):
    with pytest.raises(NotImplementedError):
        ap.score(model, PROMPTS[0], methods=type("Empty", (Method,), {"name": "Empty"})(), max_new_tokens=2)


def test_layers_of_a_score(model):
    (score,) = ap.score(model, PROMPTS[0], methods=["Perplexity", "RAUQ", "SAUQ"], max_new_tokens=4)
    table = score.layers("SAUQ")
    assert list(table.columns) == ["layer", "head", "step", "signal", "confidence"]
    assert list(table["layer"]) == [1] * 4 + [2] * 4
    assert list(table["step"]) == [1, 2, 3, 4] * 2
    for trace in score.assessments["SAUQ"].layers:
        rows = table[table["layer"] == trace.layer]
        assert set(rows["head"]) == {trace.head}
        np.testing.assert_array_equal(rows["confidence"], trace.confidence)
        np.testing.assert_array_equal(rows["signal"], trace.signal)
        # what the layer says follows from its own table
        assert 1 - np.log(rows["confidence"]).mean() == pytest.approx(trace.uncertainty, abs=1e-9)
    assert score.layers().equals(score.layers("RAUQ"))  # the first method with layers
    for name in ("Perplexity", "SAUQ-generation"):
        with pytest.raises(ValueError, match=r"RAUQ, SAUQ"):
            score.layers(name)


# --- the recurrence itself, on evidence made by hand ------------------------------------------------------


def evidence(log_probability, signal, layers=(0,), heads=(0, 1, 2)) -> Evidence:
    """Evidence with the given `row_peak` [layer, step] at the third watched head and 0.5 at the others."""
    signal = np.atleast_2d(np.asarray(signal, dtype=float))
    trace = np.full((len(layers), 3, signal.shape[1]), 0.5)
    trace[:, 2] = signal
    log_probability = np.asarray(log_probability, dtype=float)
    return Evidence(
        log_probability=log_probability,
        entropy=np.ones_like(log_probability),
        traces={"row_peak": trace},
        layers=layers,
        heads=heads,
        n_layers=len(layers),
        vocabulary=97,
    )


def test_the_recurrence_by_hand():
    p, s = [0.5, 0.8, 0.1], [math.nan, 0.25, 0.9]
    c2 = 0.2 * 0.8 + 0.8 * 0.25 * 0.5
    c3 = 0.2 * 0.1 + 0.8 * 0.9 * c2
    assessment = PeakUQ().assess(evidence(np.log(p), s))
    assert assessment.uncertainty == pytest.approx(1 - np.log([0.5, c2, c3]).mean(), abs=1e-12)
    np.testing.assert_allclose(assessment.layers[0].confidence, [0.5, c2, c3], atol=1e-12)


def test_the_first_signal_is_not_used():
    made = [evidence([-1.0, -2.0], [first, 0.3]) for first in (0.0, 1.0, math.nan)]
    values = [PeakUQ().assess(one).uncertainty for one in made]
    assert values[0] == values[1] == values[2]


def test_heads_go_by_their_own_numbers():
    assessment = PeakUQ().assess(evidence([-1.0, -2.0], [0.1, 0.3], heads=(4, 5, 8)))
    assert assessment.layers[0].head == 8


def test_probabilities_beyond_the_range_of_float32_stay_finite():
    assessment = PeakUQ().assess(evidence([-2000.0, -2000.0, -1500.0], [1.0, 0.0, 0.0]))
    expected = 1 - (-2000.0 + (math.log(0.2) - 2000.0) + (math.log(0.2) - 1500.0)) / 3
    assert assessment.uncertainty == pytest.approx(expected, rel=1e-12)


def test_more_routing_means_less_uncertainty():
    values = [PeakUQ().assess(evidence([-0.1] * 5, [s] * 5)).uncertainty for s in (0.1, 0.5, 1.0)]
    assert values[0] > values[1] > values[2] > 1
    assert values[2] == pytest.approx(1.1)  # a signal of 1 carries everything over


def test_the_largest_layer_decides():
    made = evidence(np.log([0.5, 0.5, 0.5]), [[0.9] * 3, [0.2] * 3, [0.6] * 3], layers=(0, 1, 2))
    assessment = PeakUQ(layers="all").assess(made)
    assert assessment.deciding.layer == 1
    assert assessment.uncertainty == assessment.layers[1].uncertainty
    assert [trace.layer for trace in PeakUQ(layers=[0, 2]).assess(made).layers] == [0, 2]
    assert [trace.layer for trace in PeakUQ().assess(made).layers] == [1, 2]
