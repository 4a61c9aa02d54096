"""Lookback analyzers that report traces alone."""

from __future__ import annotations

import pytest
import torch
from stream.dense import random_attention, traced
from tiny import tiny_model

import attnprobe as ap
from attnprobe.functional.factored import Factors

KINDS = [ap.SelfAttention, ap.PreviousTokenAttention]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_final_value_the_trace_is_the_same(kind):
    chunks = random_attention(11, 6).chunks([4, 5])
    whole, bare = kind(trace=True), kind(final=False, trace=True)
    expected, found = traced(whole, chunks), traced(bare, chunks)
    assert found.keys() == expected.keys() == whole.compute().keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value)
    assert bare.compute() == {}
    assert bare.only_traces
    assert not whole.only_traces


@pytest.mark.parametrize("kind", KINDS)
def test_neither_final_nor_trace_is_nothing(kind):
    with pytest.raises(ValueError, match="add trace=True"):
        kind(final=False)


@pytest.mark.parametrize("method", ["RAUQ", "RAUQ-paper", "Perplexity"])
def test_on_a_plain_model_rows_of_the_prompt_are_not_computed(method, monkeypatch):
    model, rows = tiny_model("llama", attention="sdpa"), []
    pattern = Factors.pattern
    monkeypatch.setattr(Factors, "pattern", lambda self: rows.append(self.q.shape[2]) or pattern(self))
    ap.score(model, [list(range(3, 43))], methods=method, max_new_tokens=5)
    n_layers = 1 if method == "Perplexity" else 2
    read = 6 if method == "RAUQ-paper" else 5  # and the last row of the prompt once more, to check the host
    assert sum(rows) == n_layers * (read + 1)


def test_a_probe_on_traces_alone_has_no_final_variable():
    probe = ap.Probe([ap.SelfAttention(final=False, trace=True)], layers=[1])
    model = tiny_model("llama", attention="sdpa")
    with probe.attach(model):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    results = probe.results()
    assert set(results.data_vars) == {"self_attention_trace"}
    assert results.sizes["step"] == 4
