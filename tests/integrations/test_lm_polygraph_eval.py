"""The command `polygraph_eval` with the configuration that is shipped: offline, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("lm_polygraph", reason='needs LM-Polygraph: pip install "attnprobe[lm-polygraph]"')

import torch
from integrations.polygraph_models import PROMPTS, whitebox, words

import attnprobe as ap
from attnprobe.integrations import lm_polygraph as bridge

CONFIG = Path(bridge.__file__).parent / "example" / "polygraph_eval.yaml"
SHARED = ["SAUQ", "SAUQ-generation", "RAUQ", "LapEigValRAUQ", "LogDetRAUQ", "AttentionScore"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the command saved, and the model that it read."""
    folder = tmp_path_factory.mktemp("polygraph")
    model = whitebox()
    # the checkpoint asks for sampling, and the configuration for greedy answers
    model.model.generation_config.do_sample = True
    model.model.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    pd.DataFrame({"question": PROMPTS, "answer": ["w1 w2", "w3", "w4"]}).to_csv(folder / "table.csv", index=False)
    command = [
        str(Path(sys.executable).parent / "polygraph_eval"),
        f"model.path={folder / 'model'}",
        f"dataset={folder / 'table.csv'}",
        f"save_path={folder / 'output'}",
        "max_new_tokens=6",
        "batch_size=2",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HYDRA_CONFIG": str(CONFIG), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, **offline})
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "output" / "ue_manager_seed1", weights_only=False), model.model


def test_every_estimator_has_the_number_of_score(run):
    saved, model = run
    ids = [words()(prompt)["input_ids"] for prompt in PROMPTS]
    half = ap.RAUQ(alpha=0.5, layers="all")
    half.name = "RAUQ(alpha=0.5, layers=all)"
    expected = ap.score(model, ids, completions=saved["stats"]["greedy_tokens"], methods=[*SHARED, half], batch_size=1)
    for name in [*SHARED, half.name]:
        found = saved["estimations"]["sequence", f"AttnProbe_{name}"]
        np.testing.assert_allclose(found, [one.uncertainty[name] for one in expected], rtol=1e-6, atol=1e-6)
    assert len(saved["estimations"]["sequence", "MaximumSequenceProbability"]) == len(PROMPTS)


def test_answers_are_greedy_and_metrics_are_computed(run):
    saved, model = run
    ids = [words()(prompt)["input_ids"] for prompt in PROMPTS]
    greedy = [one.token_ids for one in ap.score(model, ids, methods="Perplexity", max_new_tokens=6)]
    assert saved["stats"]["greedy_tokens"] == greedy
    assert ("sequence", "AttnProbe_SAUQ", "Rouge_rougeL", "prr_0.5_normalized") in saved["metrics"]
