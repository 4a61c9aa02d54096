"""Features of a tiny model against dense float64, and the folder they are kept in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from polarity.labelled import pairs, reader, words

import attnprobe
from attnprobe.hosts import host_of
from attnprobe.polarity import LabelledAnswer, features_of
from attnprobe.polarity.features import read_features
from attnprobe.polarity.reading import readings
from attnprobe.truncation import SHORTEST_PROMPT, middle_cut

ROOT = Path(attnprobe.__file__).parents[1]
FIVE_HEADS = [(0, 0), (0, 3), (1, 2), (2, 1), (2, 3)]


def patterns(model, ids):
    """Rows of every head from an eager forward, normalised in float64."""
    with torch.no_grad():
        layers = model(torch.tensor([ids]), output_attentions=True).attentions
    found = torch.stack([layer[0] for layer in layers]).double()
    return (found / found.sum(-1, keepdim=True)).numpy()


def width(a, t):
    """Conductance of the cut after token t, by loops over the entries of a pattern."""
    n = len(a)
    crossing = sum(a[i, j] for i in range(n) for j in range(n) if (i < t) != (j < t))
    volume = sum(a[i].sum() for i in range(t)) + sum(a[:, j].sum() for j in range(t))
    return crossing / min(volume, 2 * n - volume)


def direction(a):
    """asymmetry^2, gradient^2 and curl^2 of a pattern, by loops over its entries."""
    n = len(a)
    size = sum(a[i, j] ** 2 for i in range(n) for j in range(n))
    skew = [[(a[i, j] - a[j, i]) / 2 for j in range(n)] for i in range(n)]
    asymmetry = sum(entry**2 for row in skew for entry in row) / size
    gradient = 2 * sum(sum(row) ** 2 for row in skew) / n / size
    return asymmetry, gradient, asymmetry - gradient


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_five_heads_agree_with_a_dense_float64_computation(name, tmp_path):
    model, eager = reader(name), reader(name, attention="eager")
    answers = pairs(4)
    found = features_of(model, answers, label="made", folder=tmp_path, batch_size=3, progress=False)
    assert list(found.answers["id"]) == [answer.id for answer in answers]
    assert list(found.answers["label"]) == [answer.label for answer in answers]
    for i, answer in enumerate(answers):
        ids = model.tokenizer(answer.prompt)["input_ids"] + model.tokenizer(answer.answer, False)["input_ids"]
        dense = patterns(eager, ids)
        assert found.answers["prompt_tokens"][i] + found.answers["tokens"][i] == len(ids)
        for layer, head in FIVE_HEADS:
            there = {name: values[i, layer, head] for name, values in found.values.items()}
            narrowest = min(width(dense[layer, head], t) for t in range(1, len(ids)))
            assert there["phi"] == pytest.approx(narrowest, abs=2e-5)
            # Two cuts may be of one width to a rounding: the one that is named is of that width.
            assert width(dense[layer, head], round(there["cut"] * len(ids))) == pytest.approx(narrowest, abs=2e-5)
            squares = [there[name] ** 2 for name in ("asymmetry", "gradient", "curl")]
            np.testing.assert_allclose(squares, direction(dense[layer, head]), atol=2e-5)


def test_batches_and_orders_change_nothing(tmp_path):
    answers, model = pairs(5), reader()
    one, many = (
        features_of(model, answers, label="made", folder=tmp_path / str(size), batch_size=size, progress=False)
        for size in (1, 7)
    )
    for quantity in ("phi", "cut", "asymmetry", "gradient"):
        np.testing.assert_allclose(one.values[quantity], many.values[quantity], atol=1e-5)


def test_middle_cut_keeps_both_ends():
    assert middle_cut(range(10), 5) == [0, 1, 2, 8, 9]
    assert middle_cut(range(10), 1) == [0]
    assert middle_cut(range(4), 4) == [0, 1, 2, 3]


def test_long_prompts_lose_their_middle_and_are_counted(tmp_path):
    model = reader()
    answers = [
        LabelledAnswer("long", "q", words(60), words(5), 1),
        LabelledAnswer("short", "q", words(10), words(5), 0),
    ]
    found = features_of(model, answers, label="made", folder=tmp_path, max_tokens=40, progress=False)
    assert found.truncated == 1
    assert list(found.answers["prompt_tokens"]) == [35, 11]
    assert list(found.answers["prompt_tokens_cut"]) == [26, 0]
    whole = model.tokenizer(words(60))["input_ids"]
    (seen,) = readings(answers[:1], model.tokenizer, 40)
    assert seen.prompt == whole[:18] + whole[-17:]
    assert seen.cut == 26
    values = read_features(host_of(model), [whole[:18] + whole[-17:]], [seen.completion])["phi"][1]
    np.testing.assert_allclose(found.values["phi"][0], values[0], atol=1e-5)


def test_an_answer_without_room_for_its_prompt_is_left_out_and_said(tmp_path):
    answers = [
        LabelledAnswer("fits", "q", words(60), words(40 - SHORTEST_PROMPT), 1),
        LabelledAnswer("too long", "q", words(60), words(41 - SHORTEST_PROMPT), 0),
        LabelledAnswer("short prompt", "q", words(3), words(36), 0),
    ]
    found = features_of(reader(), answers, label="made", folder=tmp_path, max_tokens=40, progress=False)
    assert list(found.answers["id"]) == ["fits", "short prompt"]
    assert list(found.failed) == ["too long"]
    assert "leaves no room for a prompt in 40" in found.failed["too long"]


def test_more_questions_go_on_in_the_same_folder(tmp_path):
    answers, model = pairs(6), reader()
    settings = dict(label="made", folder=tmp_path, progress=False)
    features_of(model, answers, chosen=answers[:4], **settings)
    seen = count_forwards(model)
    found = features_of(model, answers, chosen=answers[:8], batch_size=1, **settings)
    assert len(found.answers) == 8
    assert len(seen) == 4
    assert len(features_of(model, answers, chosen=answers[:2], **settings).answers) == 2
    assert len(seen) == 4


def count_forwards(model):
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(1))
    return seen


@pytest.mark.parametrize("change", ["answers", "weights", "max_tokens"])
def test_a_folder_of_something_else_is_refused(change, tmp_path):
    answers, model = pairs(3), reader()
    features_of(model, answers, label="made", folder=tmp_path, progress=False)
    other, settings = answers, {"max_tokens": 100}
    if change == "answers":
        other = [*answers[:-1], LabelledAnswer("q2:1", "q2", "another", "answer", 1)]
    elif change == "weights":
        with torch.no_grad():
            next(iter(model.parameters()))[0, 0] += 1
    else:
        settings = {"max_tokens": 90}
    with pytest.raises(ValueError, match=f"holds rows of other settings .*{change}"):
        features_of(model, other, label="made", folder=tmp_path, progress=False, **settings)


KILLED = """
import os, signal, sys
from pathlib import Path
from polarity.labelled import pairs, reader
from attnprobe.polarity import features_of
model, forwards = reader(), []

def count(*_):
    forwards.append(1)
    if len(forwards) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

model.register_forward_pre_hook(count)
features_of(model, pairs(5), label="made", folder=Path(sys.argv[1]), batch_size=1, progress=False)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_run_goes_on_and_reads_every_answer_once(tmp_path):
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == -9
    model = reader()
    seen = count_forwards(model)
    found = features_of(model, pairs(5), label="made", folder=folder, batch_size=1, progress=False)
    assert len(seen) == 10 - 3
    expected = features_of(model, pairs(5), label="made", folder=whole, batch_size=1, progress=False)
    assert found.answers.equals(expected.answers)
    for quantity, values in expected.values.items():
        np.testing.assert_array_equal(found.values[quantity], values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 16}, "use at least 17"),
        ({"max_tokens": 129}, "the model reads at most 128"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_settings_out_of_range(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        features_of(reader(), pairs(2), label="made", folder=tmp_path, progress=False, **settings)


def test_a_model_without_a_tokenizer(tmp_path):
    model = reader()
    del model.tokenizer
    with pytest.raises(ValueError, match="no tokenizer"):
        features_of(model, pairs(2), label="made", folder=tmp_path, progress=False)
