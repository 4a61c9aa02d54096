"""Statistics straight from queries and keys give what the same statistics give from the pattern."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny_model

import attnprobe as ap
import attnprobe.rows

ANALYZERS = {
    "transport": lambda: ap.TransportCapacity(landscape=True),
    "asymmetry": ap.Asymmetry,
    "routing": lambda: ap.MeanRoutingSplit(bound=False),
    "sketch": lambda: ap.IntrinsicTDO(method="sketch", rank=32),
}


def run(model, analyzers):
    ids = torch.randint(3, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    probe = ap.Probe(analyzers)
    with probe.attach(model):
        model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    return probe.results()


@pytest.mark.parametrize("name", [*ANALYZERS, "all"])
def test_fused_sums_are_those_of_the_pattern(name, monkeypatch):
    make = ANALYZERS.values() if name == "all" else [ANALYZERS[name]]
    model = tiny_model("llama", attention="sdpa")
    expected = run(model, [one() for one in make])
    monkeypatch.setattr(attnprobe.rows, "can_fuse", lambda factors: True)
    called = []
    column_sums = attnprobe.rows.column_sums
    monkeypatch.setattr(attnprobe.rows, "column_sums", lambda factors: called.append(factors) or column_sums(factors))
    found = run(model, [one() for one in make])
    assert set(found.data_vars) == set(expected.data_vars)
    for variable in expected.data_vars:
        gap = abs(np.nan_to_num(found[variable].values) - np.nan_to_num(expected[variable].values))
        assert (np.isnan(found[variable].values) == np.isnan(expected[variable].values)).all(), variable
        # squares on and off the diagonal add up in another order; the curl is what is left of them
        assert (gap <= (2e-3 if "curl" in variable else 2e-5)).all(), variable
    assert sum(factors.q.shape[2] for factors in called) == 3 * 35  # every row of three layers, once


def test_an_analyzer_that_asks_for_the_pattern_gets_it(monkeypatch):
    monkeypatch.setattr(attnprobe.rows, "can_fuse", lambda factors: True)
    model = tiny_model("llama", attention="sdpa")
    found = run(model, [ap.SelfAttention(), ap.TransportCapacity()])
    monkeypatch.undo()
    expected = run(model, [ap.SelfAttention(), ap.TransportCapacity()])
    for variable in expected.data_vars:
        assert (abs(found[variable].values - expected[variable].values) <= 2e-5).all(), variable
