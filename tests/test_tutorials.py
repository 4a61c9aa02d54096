"""The tutorials run, and their numbers are what they say."""

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

TUTORIALS = Path(__file__).resolve().parent.parent / "tutorials"


@pytest.fixture(scope="module")
def copy_task(tmp_path_factory):
    """Everything the short form of the copy task defines, and where its picture is."""
    picture = tmp_path_factory.mktemp("copy") / "copy.svg"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COPY_TASK", "small")
        patch.setenv("COPY_TASK_PICTURE", str(picture))
        return runpy.run_path(str(TUTORIALS / "copy_task.py")) | {"picture": picture}


@pytest.mark.model
def test_pairs_differ_in_one_bit_alone(copy_task):
    for length in (4, 16, 64):
        pairs = copy_task["pairs_of"](length, 10, 0)
        assert pairs == copy_task["pairs_of"](length, 10, 0)
        for pair in pairs:
            assert pair["zeros"] == "0" * length
            assert sorted(pair["hidden"]) == ["0"] * (length - 1) + ["1"]
            assert [a == b for a, b in zip(pair["plain"], pair["needle"], strict=True)].count(False) == 1


@pytest.mark.model
def test_perplexity_of_the_missed_one_is_that_of_the_model(copy_task):
    model, scores = copy_task["model"], copy_task["scores"]
    assert len(scores) == 2 * 3 * 3
    pair = copy_task["pairs_of"](8, 3, 0)[1]
    prompt, answer = model.tokenizer(pair["needle"])["input_ids"], model.tokenizer(" " + pair["zeros"])["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0].double()
    expected = -sum(float(logits[len(prompt) - 1 + t].log_softmax(-1)[token]) for t, token in enumerate(answer)) / len(
        answer
    )
    chosen = scores[(scores["length"] == 8) & (scores["pair"] == 1) & (scores["answer"] == "missed one")]
    assert chosen["Perplexity"].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.model
def test_separation_counts_the_pairs_in_which_the_second_answer_is_higher(copy_task):
    scores, table = copy_task["scores"], copy_task["table"]
    assert len(table) == 2 * 4 * 2
    for row in table.itertuples():
        of = scores[scores["length"] == row.length].groupby("answer")[row.method].apply(list)
        wins = [(b > a) + (b == a) / 2 for a in of["right zeros"] for b in of[row.answer]]
        assert row.auroc == pytest.approx(sum(wins) / len(wins))


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the picture needs matplotlib")
def test_picture(copy_task):
    assert "<svg" in copy_task["picture"].read_text()
