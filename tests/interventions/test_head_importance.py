"""The study of head importance: partial rank correlations, matched pairs, and losses from the ablated layer on."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from tiny import tiny_model

import attnprobe as ap

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks import head_importance as study


def heads_of(n: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    columns = {name: rng.random(n) for name in ("participation_ratio", "sink_score", "increase")}
    return pd.DataFrame({"layer": rng.integers(0, 4, n), "head": range(n), **columns})


def test_partial_spearman_is_the_textbook_formula():
    heads = heads_of(40)
    x, y, z = heads.participation_ratio, heads.increase, heads.sink_score
    xy, xz, yz = (stats.spearmanr(a, b).statistic for a, b in ((x, y), (x, z), (y, z)))
    expected = (xy - xz * yz) / ((1 - xz**2) * (1 - yz**2)) ** 0.5
    assert study.partial_spearman(x, y, z) == pytest.approx(expected, rel=1e-9)
    assert study.partial_spearman(x, y) == pytest.approx(xy, rel=1e-9)


def test_layers_are_held_fixed():
    layer = np.repeat(np.arange(5), 6)
    within = np.tile(np.arange(6), 5)
    x, y = 100 * layer + within, 100 * layer - within  # rises with the layer, falls within each
    assert study.partial_spearman(x, y) > 0.9
    assert study.partial_spearman(x, y, group=layer) == pytest.approx(-1)


def test_pairs_are_the_best_of_all_matchings():
    for seed in range(5):
        heads = heads_of(9, seed)
        ratio, sink = heads.participation_ratio.to_numpy(), heads.sink_score.to_numpy()
        median = np.median(ratio)
        high, low = [i for i in range(9) if ratio[i] > median], [i for i in range(9) if ratio[i] <= median]
        best = (0, 0.0)
        for partners in itertools.permutations(low, len(high)):
            differences = [abs(sink[i] - sink[j]) for i, j in zip(high, partners, strict=True)]
            kept = [d for d in differences if d <= 0.15]
            best = min(best, (-len(kept), sum(kept)))
        found = study.matched(heads, 0.15)
        assert (-len(found), sum(abs(sink[i] - sink[j]) for i, j in found)) == pytest.approx(best)
        assert all(ratio[i] > median >= ratio[j] for i, j in found)
        assert all(abs(heads.layer[i] - heads.layer[j]) <= 1 for i, j in study.matched(heads, 0.15, 1))


def test_losses_from_a_layer_on_are_those_of_the_whole_model():
    model = tiny_model("llama", attention="sdpa")
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    means = ap.head_means(model, ids.flip(0))
    found = study.increases(model, ids, means, ("zero", "mean", "sink"))
    assert len(found) == 3 * 4 * 3
    with torch.no_grad():
        before = study.losses(model(ids).logits, ids)
        for row in found.sample(8, random_state=0).itertuples():
            given = {"reference": means} if row.mode == "mean" else {}
            with ap.ablate(model, [(row.layer, row.head)], mode=row.mode, **given):
                logits = model(ids).logits
            log_probability = logits.double().log_softmax(-1)
            after = [-sum(log_probability[i, t, ids[i, t + 1]] for t in range(11)) / 11 for i in range(2)]
            added = [float(a - b) for a, b in zip(after, before, strict=True)]
            assert row.increase == pytest.approx(sum(added) / 2, abs=1e-5)
            assert row.standard_error == pytest.approx(abs(added[0] - added[1]) / 2, abs=1e-5)
    assert len(model.model.layers) == 3


def test_a_planted_dependence_is_found_by_both_answers():
    heads = heads_of(120)
    heads["increase"] = heads.participation_ratio + 3 * heads.sink_score
    found = study.answers(heads, caliper=0.05, layers_apart=2, seed=0)
    assert found["participation_ratio | sink_score"]["low"] > 0.5
    assert found["pairs"]["low"] > 0
    assert found["pairs"]["high_matters_more"] > 0.9
    heads["increase"] = 3 * heads.sink_score
    assert abs(study.answers(heads, 0.05, 2, 0)["pairs"]["median_difference"]) < 0.05
