"""Analyzers at some of the layers that a probe watches, and the unembedding's leverage."""

import numpy as np
import pytest
import torch
from probe.support import FREE, bridge, tokens
from tiny import tiny_bridge, tiny_model

import attnprobe as ap
from attnprobe.functional import leverage_scores
from attnprobe.hosts import host_of
from attnprobe.leverage import leverage_of


def watched(analyzers, layers="all"):
    model = bridge("llama")
    probe = ap.Probe(analyzers, layers=layers, logits=True)
    with probe.attach(model):
        model.generate(tokens(7)[0][None], max_new_tokens=4, **FREE)
    return probe.results()


def test_an_analyzer_at_some_layers_has_no_value_at_others():
    every = watched([ap.SelfAttention(trace=True), ap.TransportCapacity(trace=True)])
    some = watched([ap.SelfAttention(trace=True).at([1]), ap.TransportCapacity(trace=True)])
    assert some.layer.values.tolist() == [0, 1, 2]
    for name, layers in (
        ("self_attention", [1]),
        ("self_attention_trace", [1]),
        ("phi", [0, 1, 2]),
        ("phi_trace", [0, 1, 2]),
    ):
        others = [layer for layer in (0, 1, 2) if layer not in layers]
        np.testing.assert_array_equal(some[name].sel(layer=layers), every[name].sel(layer=layers))
        assert np.isnan(some[name].sel(layer=others)).all()
        assert some[name].shape == every[name].shape


def test_layers_that_no_analyzer_is_for_are_not_watched():
    found = watched([ap.SelfAttention().at("center"), ap.TransportCapacity().at([1])])
    assert found.layer.values.tolist() == [1]


def test_at_leaves_the_analyzer_as_it_was():
    analyzer = ap.SelfAttention()
    assert analyzer.at([2]).layers == (2,)
    assert analyzer.layers is None
    assert "layers=(2,)" in repr(analyzer.at([2]))


@pytest.mark.parametrize(
    ("layers", "message"),
    [([7], "SelfAttention is for layers=.7,. and the probe watches none of them"), ("last", "layers='last'")],
)
def test_layers_that_are_not_there(layers, message):
    with pytest.raises(ValueError, match=message):
        watched([ap.SelfAttention().at(layers)], layers=[0, 1])


def test_leverage_is_computed_once_and_again_when_the_weights_change(monkeypatch):
    import attnprobe.leverage as module

    calls = []
    monkeypatch.setattr(module, "leverage_scores", lambda w: calls.append(1) or leverage_scores(w))
    host = host_of(tiny_bridge("llama"))  # its own: the weights are changed
    first = leverage_of(host)
    assert leverage_of(host) is first
    assert len(calls) == 1
    with torch.no_grad():
        host.unembedding().data[3] *= 2.0
    second = leverage_of(host)
    assert len(calls) == 2
    torch.testing.assert_close(second, leverage_scores(host.unembedding().detach()))
    assert not torch.equal(first, second)


class KeyMass(ap.Analyzer):
    """Attention to the first keys."""

    def __init__(self, keys, **settings):
        super().__init__(**settings)
        self.keys = keys

    def update(self, rows):
        self.accumulate(mass=rows.pattern[..., : self.keys].sum((-1, -2)), rows=rows.count[:, None])

    def compute(self):
        return {"key_mass": self.total["mass"] / self.total["rows"]}


class ScreenedKeys(ap.ScreenedRecurrent):
    signal = "key_mass_screened"

    def __init__(self, keys):
        super().__init__()
        self.name, self.keys = f"ScreenedKeys{keys}", keys

    def analyzers(self):
        return [*super().analyzers(), self.at_chosen_heads(KeyMass(self.keys))]


class Strided(ap.Recurrent):
    name, signal = "Strided", "self_attention"

    def analyzers(self):
        return [ap.SelfAttention(final=False, trace=True, stride=3)]


class Doubt(ap.Recurrent):
    name, signal = "Doubt", "self_attention"

    def analyzers(self):
        return [ap.SelfAttention(trace=True)]


@pytest.mark.parametrize("host", ["bridge", "plain"])
def test_two_traces_of_one_name_are_refused_unless_they_are_the_same(host):
    model = (
        bridge("llama")
        if host == "bridge"
        else ap.load_model(tiny_model("llama", attention="sdpa"), host="transformers")
    )
    prompt = tokens(7)[0].tolist()
    with pytest.raises(ValueError, match="two analyzers both trace 'key_mass' and their values differ"):
        ap.score(model, prompt, methods=[ScreenedKeys(1), ScreenedKeys(3)], max_new_tokens=6)
    with pytest.raises(ValueError, match="two analyzers both trace 'self_attention'"):
        ap.score(model, prompt, methods=["RAUQ", Strided()], max_new_tokens=6)
    both = ap.score(model, prompt, methods=["RAUQ", Doubt()], max_new_tokens=6)[0]
    assert both.uncertainty["RAUQ"] == pytest.approx(both.uncertainty["Doubt"])


@pytest.mark.parametrize("method", [ap.SAUQ(), ap.SAUQ(screen="mean"), ap.LogDetRAUQ()], ids=lambda one: one.name)
@pytest.mark.parametrize("turns", [(4, 1, 6), (4, 6)])
@pytest.mark.parametrize("host", ["bridge", "plain"])
def test_a_chat_with_short_turns_is_scored_like_its_last_answer(host, turns, method):
    """Each turn appends a user's tokens and an answer to the same cache."""
    hooked = bridge("llama")
    plain = tiny_model("llama", attention="sdpa")
    model = hooked if host == "bridge" else ap.load_model(plain, host="transformers")
    text = tokens(4 + sum(turns) + 3 * len(turns), seed=5)[0].tolist()
    probe = method.probe()
    cache, seen = None, 0
    with probe.attach(model), torch.no_grad():
        driver = host_of(model)
        for i, turn in enumerate(turns):
            new = 4 if i == 0 else 3
            for piece in (new, *[1] * (turn - 1)):
                ids = torch.tensor([text[seen : seen + piece]])
                seen += piece
                mask = torch.ones(1, seen, dtype=torch.int64)
                _, cache = driver.decode(ids, mask, cache, 1)
            seen_prompt = seen - (turn - 1)
    probe.last_tokens(torch.tensor([text[seen]]))
    found = method.score(probe)[0].uncertainty
    expected = ap.score(model, text[:seen_prompt], completions=[text[seen_prompt : seen + 1]], methods=[method])
    assert found == pytest.approx(expected[0].uncertainty[method.name], rel=1e-5)


@pytest.mark.parametrize("chunk", [3, 4])
@pytest.mark.parametrize("method", [ap.SAUQ(), ap.LapEigValRAUQ()], ids=lambda one: one.name)
def test_a_prompt_that_is_read_in_chunks(method, chunk):
    model = ap.load_model(tiny_model("llama", attention="sdpa"), host="transformers")
    ids = tokens(9, seed=2)[0][None]
    settings = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    probe = method.probe()
    with probe.attach(model), torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), prefill_chunk_size=chunk, **settings)
    found = method.score(probe)[0].uncertainty
    expected = ap.score(model, ids[0].tolist(), completions=[out[0, 9:].tolist()], methods=[method])[0]
    assert found == pytest.approx(expected.uncertainty[method.name], rel=1e-5)


@pytest.mark.parametrize("layers", [[1.7], [True], ["5"], 3.5])
def test_layers_of_a_score_are_whole_numbers(layers):
    with pytest.raises(TypeError, match="give whole numbers"):
        ap.SAUQ(layers=layers)


def test_alpha_is_a_number():
    with pytest.raises(ValueError, match=r"alpha='0.2' weighs a probability"):
        ap.SAUQ(alpha="0.2")


@pytest.mark.parametrize("layers", [[], [-1]])
def test_layers_of_a_score_are_at_least_one(layers):
    with pytest.raises(ValueError, match="give at least one layer number, counted from 0"):
        ap.SAUQ(layers=layers)
