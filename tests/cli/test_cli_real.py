"""The command line end to end, on the embedded model."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

import attnprobe as ap
from attnprobe.cli import main as cli

pytestmark = pytest.mark.model

PROMPT = "The three primary colours are red, yellow and"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def model():
    return ap.load_model()


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(cli.app, list(arguments), input=stdin)


def strict(line: str):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_text_output_holds_the_answer_and_its_uncertainty(model):
    result = run("score", PROMPT, "--max-new-tokens", "4", "--method", "SAUQ", "--method", "Perplexity")
    assert result.exit_code == 0, result.output
    (score,) = ap.score(model, PROMPT, methods=["SAUQ", "Perplexity"], max_new_tokens=4)
    assert score.text.strip()
    assert score.text.strip() in result.stdout
    lines = result.stdout.splitlines()
    for method in ("SAUQ", "Perplexity"):
        (line,) = [line for line in lines if line.startswith("uncertainty") and f" {method} " in line]
        assert float(line.split()[-1]) == pytest.approx(score.uncertainty[method], abs=6e-4)
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    for row, token in zip(rows, score.tokens["token"], strict=True):
        assert (token.strip() or repr(token)[1:-1]) in row
    assert "\x1b" not in result.stdout  # no colours in a pipe
    assert "Traceback" not in result.output


def test_json_is_one_strict_object(model):
    result = run("score", PROMPT, "--json", "--max-new-tokens", "4", "-m", "SAUQ", "-m", "RAUQ")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    record = strict(line)
    assert set(record) == {"text", "uncertainty", "tokens"}
    (score,) = ap.score(model, PROMPT, methods=["SAUQ", "RAUQ"], max_new_tokens=4)
    assert record["text"] == score.text
    assert list(record["uncertainty"]) == ["SAUQ", "RAUQ"]
    assert record["uncertainty"] == pytest.approx(score.uncertainty, abs=1e-6)
    assert [row["token_id"] for row in record["tokens"]] == score.token_ids
    assert [row["step"] for row in record["tokens"]] == [1, 2, 3, 4]
    for row, confidence in zip(record["tokens"], score.tokens["confidence"], strict=True):
        assert 0 < row["probability"] <= 1
        assert math.log(row["probability"]) == pytest.approx(row["log_probability"], abs=1e-6)
        assert row["confidence"] == pytest.approx(confidence, abs=1e-6)
    # nothing was carried over into the first token
    assert record["tokens"][0]["signal"] is None or 0 <= record["tokens"][0]["signal"] <= 1


def test_a_single_token_is_strict_json_too():
    result = run("score", PROMPT, "--json", "--max-new-tokens", "1")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    record = strict(line)
    assert len(record["tokens"]) == 1
    assert record["uncertainty"]["SAUQ"] == pytest.approx(1 - record["tokens"][0]["log_probability"], abs=1e-6)


def test_a_file_of_prompts_one_object_a_line_whatever_the_batch(tmp_path, model):
    prompts = [PROMPT, "Once upon a time, in a land of snow and ice, there lived an old king who", "2 + 2 ="]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(prompts) + "\n", encoding="utf-8")
    result = run("score", "--file", str(file), "--json", "--max-new-tokens", "3", "--batch-size", "2")
    assert result.exit_code == 0, result.output
    records = [strict(line) for line in result.stdout.splitlines()]
    scores = ap.score(model, prompts, max_new_tokens=3)
    assert [record["text"] for record in records] == [score.text for score in scores]
    for record, score in zip(records, scores, strict=True):
        assert record["uncertainty"]["SAUQ"] == pytest.approx(score.uncertainty["SAUQ"], abs=1e-4)


def test_a_prompt_in_a_pipe(model):
    result = run("score", "--json", "--max-new-tokens", "3", stdin=PROMPT + "\n")
    assert result.exit_code == 0, result.output
    (score,) = ap.score(model, PROMPT, max_new_tokens=3)
    assert strict(result.stdout)["text"] == score.text


def test_chat_uses_the_template(model):
    result = run("score", QUESTION, "--chat", "--json", "--max-new-tokens", "12")
    assert result.exit_code == 0, result.output
    record = strict(result.stdout)
    assert "Paris" in record["text"]
    (score,) = ap.score(model, QUESTION, chat=True, max_new_tokens=12)
    assert record["text"] == score.text
    assert record["uncertainty"]["SAUQ"] == pytest.approx(score.uncertainty["SAUQ"], abs=1e-6)
    (plain,) = ap.score(model, QUESTION, max_new_tokens=12)
    assert plain.token_ids != score.token_ids


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "SAUK"), "SAUQ"),
        (("--method", "SAUQ", "--method", "SAUQ"), "twice"),
        (("--model", "./no/such/folder"), "no/such/folder"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_status_2(arguments, said):
    result = run("score", PROMPT, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert said in line
    assert "Traceback" not in result.output


def test_models_shows_the_embedded_model_and_where_it_is():
    from attnprobe.embedded import EMBEDDED_MODEL, cache_dir

    result = run("models")
    assert result.exit_code == 0, result.output
    assert EMBEDDED_MODEL in result.stdout
    assert "ready" in result.stdout
    assert str(cache_dir()) in result.stdout
