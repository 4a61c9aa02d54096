"""`attnprobe polarity` on a tiny model: what it prints, writes, and says when something is wrong."""

from __future__ import annotations

import json

import pytest
from polarity.labelled import reader, write_pairs
from typer.testing import CliRunner

import attnprobe as ap
from attnprobe.cli.main import app

FEW = ["--permutations", "99", "--resamples", "20", "--bins", "2", "--max-tokens", "100"]


@pytest.fixture
def call(monkeypatch, tmp_path):
    loaded = []

    def load_model(name=None, **settings):
        loaded.append((name, settings))
        return reader()

    monkeypatch.setattr(ap, "load_model", load_model)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        found = CliRunner().invoke(app, ["polarity", *map(str, arguments)])
        found.loaded = loaded
        return found

    return run


def test_tables_of_two_data_sets(call, tmp_path):
    one, two = (write_pairs(tmp_path / f"{name}.jsonl", 6) for name in ("one", "two"))
    found = call(one, two, "--rows", 4, "--out", "out", *FEW)
    assert found.exit_code == 0, found.output
    for said in (
        "one: means over all heads",
        "length alone",
        "Reversal between one and two",
        "cosine",
        "loses the middle",
    ):
        assert said in found.stdout
    assert (tmp_path / "out" / "polarity.csv").is_file()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["data"][1]["questions"] == 4
    assert found.loaded == [(None, {"host": "transformers", "device": None, "dtype": None})]


def test_json_is_one_object_and_cut_prompts_are_said(call, tmp_path):
    path = write_pairs(tmp_path / "one.jsonl", 5, prompt=60)
    found = call(path, "--json", "--max-tokens", 40, "--model", "mine", *FEW[:-2])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert said["data"][0]["truncated"] == 10
    assert "reversal" not in said
    assert {row["quantity"] for row in said["responses"]} == {
        "phi", "cut", "asymmetry", "gradient", "curl", "below_floor",
    }  # fmt: skip
    assert "note: one: 10 of 10 answers were read after a cut prompt." in found.stderr
    assert said["settings"]["model"] == "mine"
    assert found.loaded[0][0] == "mine"


def test_the_same_command_goes_on(call, tmp_path):
    path = write_pairs(tmp_path / "one.jsonl", 5)
    assert call(path, "--rows", 2, "--quiet", *FEW).stdout == ""
    parts = sorted((tmp_path / "polarity" / "one" / "rows").iterdir())
    before = [part.read_bytes() for part in parts]
    assert call(path, *FEW).exit_code == 0
    assert [part.read_bytes() for part in parts] == before
    assert len(list((tmp_path / "polarity" / "one" / "rows").iterdir())) > len(parts)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing.jsonl"], "error: 'nothing.jsonl' cannot be read: No such file or directory"),
        (["halueval"], "error: there is no recipe 'halueval': did you mean 'halueval_qa'?"),
        (["qags"], "error: the recipe 'qags' is of no data set on the hub: give a file, qags=FILE"),
        (["one.jsonl", "one.jsonl"], "error: both data sets are called 'one'"),
        (["one.csv"], "error: row 1 of 'one.csv': prompt is missing: it should be in the column 'prompt'"),
        (["one.jsonl", "--max-tokens", "1000"], "error: max_tokens=1000 and the model reads at most 128"),
    ],
)
def test_mistakes_are_one_sentence(call, tmp_path, arguments, sentence):
    write_pairs(tmp_path / "one.jsonl", 2)
    (tmp_path / "one.csv").write_text("question,answer,label\nQ?,A,1\n", encoding="utf-8")
    found = call(*arguments)
    assert found.exit_code == 2
    assert sentence in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout == ""


def test_mistakes_in_the_data_come_before_the_model(call):
    assert call("nothing.jsonl").loaded == []


def test_another_length_in_the_same_folder(call, tmp_path):
    path = write_pairs(tmp_path / "one.jsonl", 3)
    assert call(path, *FEW).exit_code == 0
    found = call(path, *FEW[:-1], 90)
    assert found.exit_code == 2
    assert "holds rows of other settings (max_tokens: 100 is now 90): name another output" in found.stderr


def test_a_folder_that_cannot_be_written(call, tmp_path):
    path = write_pairs(tmp_path / "one.jsonl", 2)
    (tmp_path / "file").write_text("", encoding="utf-8")
    found = call(path, "--out", "file", *FEW)
    assert found.exit_code == 2
    assert "is a file, or lies in one: name a folder" in found.stderr
    assert "Traceback" not in found.stderr


def test_one_question_is_not_enough(call):
    assert call("one.jsonl", "--rows", 1).exit_code == 2
