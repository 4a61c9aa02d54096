"""Analyzers at some of the layers that a probe watches, and the unembedding's leverage."""

import numpy as np
import pytest
import torch
from probe.support import FREE, bridge, tokens

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
    host = host_of(bridge("llama"))
    first = leverage_of(host)
    assert leverage_of(host) is first
    assert len(calls) == 1
    with torch.no_grad():
        host.unembedding().data[3] *= 2.0
    second = leverage_of(host)
    assert len(calls) == 2
    torch.testing.assert_close(second, leverage_scores(host.unembedding().detach()))
    assert not torch.equal(first, second)
