"""`attnprobe bench`: what it prints and writes, and mistakes in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

pytest.importorskip("pyarrow", reason="the benchmark's packages are not installed")
pytest.importorskip("pydantic", reason="the benchmark's packages are not installed")
pytest.importorskip("yaml", reason="the benchmark's packages are not installed")

from bench.small_run import METHODS, save_model, task, write_config

import attnprobe as ap
from attnprobe.bench import runner, store
from attnprobe.bench.config import load_config
from attnprobe.cli import main as cli

ROOT = str(Path(ap.__file__).parents[1])


def run(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path, model):
    return write_config(tmp_path, model, rows=8)


@pytest.fixture(scope="module")
def output(tmp_path_factory, model):
    """The folder of a finished run, for reports."""
    return runner.run(write_config(tmp_path_factory.mktemp("finished"), model)).output


# --- run --------------------------------------------------------------------------------------------------


def test_a_run_and_once_more(config, tmp_path):
    done = run("run", config)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"12 rows in {tmp_path / 'out'} (12 of them new).\n"
    assert done.stderr == ""
    assert run("run", config).stdout == f"12 rows in {tmp_path / 'out'} (0 of them new).\n"


def test_quiet_says_nothing(config):
    done = run("run", config, "--quiet")
    assert (done.exit_code, done.output) == (0, "")


def test_options_change_the_file(config, tmp_path, monkeypatch):
    seen = {}

    def fake(settings, **options):
        seen.update(options, settings=settings)
        return runner.Results(settings.output, runner.describe(settings))

    monkeypatch.setattr(runner, "run", fake)
    with store.open_store(tmp_path / "other", runner.describe(load_config(config))):
        pass
    done = run(
        "run", config, "--output", tmp_path / "other", "--engine", "ray", "--workers", 3, "--limit", 2,
        "--retry-failed", "-q",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    settings = seen.pop("settings")
    assert seen == {"progress": False, "limit": 2, "retry_failed": True}
    assert (settings.output, settings.engine, settings.workers) == (tmp_path / "other", "ray", 3)
    assert settings.methods == load_config(config).methods


def test_limit(config, tmp_path):
    assert run("run", config, "--limit", 2).stdout.startswith("4 rows")
    assert run("run", config).stdout.startswith("12 rows")


def failing_config(tmp_path, model, ids: int):
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(f'{{"id": "q{i}\\u001b[2J", "question": "the", "references": ["a"]}}\n' for i in range(ids))
    )
    return write_config(tmp_path, model, tasks=[task(data, "T", quality="bench.test_bench_cli:hostile")])


def hostile(example, text):
    if example.id.startswith("q0"):
        raise ValueError("\x1b[31mred")
    return 1.0


def test_failed_rows_are_said_and_hostile_text_is_spelt_out(tmp_path, model):
    done = run("run", failing_config(tmp_path, model, 3))
    assert done.exit_code == 0, done.output
    assert "3 rows in" in done.stdout
    assert "1 failed, the first of them so:" in done.stdout
    assert "\\x1b[31mred" in done.stdout
    assert "\x1b" not in done.output


def test_a_run_that_fails_in_every_row_has_failed(tmp_path, model):
    done = run("run", failing_config(tmp_path, model, 1))
    assert done.exit_code == 1
    assert done.stderr.startswith("error: all 1 rows failed, the first of them so: ")
    assert "\x1b" not in done.output
    assert done.stdout == ""


def test_notices_go_to_standard_error(config, tmp_path):
    run("run", config)
    (tmp_path / "out" / "rows" / "part-000001.parquet").write_bytes(b"")
    done = run("run", config)
    assert done.stderr.startswith("note: part-000001.parquet is damaged")
    assert done.stdout.startswith("12 rows")


def one_sentence(done, status: int, said: str) -> None:
    assert done.exit_code == status, done.output
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_mistakes_in_a_run(tmp_path, model, config):
    one_sentence(run("run", tmp_path / "nowhere.yaml"), 2, "nowhere.yaml")
    one_sentence(run("run", config, "--engine", "cluster"), 2, "cluster")
    one_sentence(run("run", config, "--limit", 0), 2, "limit")
    one_sentence(run("run"), 2, "Missing argument")
    run("run", config, "--limit", 1)
    one_sentence(run("run", write_config(tmp_path, model, rows=8, methods=["SAUQ"])), 2, "rows of other settings")
    said = load_config(write_config(tmp_path, model, rows=8))
    with store.open_store(said.output, runner.describe(said)):
        one_sentence(run("run", config), 1, "error: another run is writing to")


def test_an_interrupt_is_quiet(config, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(ap, "score", interrupt)
    done = run("run", config)
    assert done.exit_code == 130
    assert done.output.strip() == ""


def test_the_second_of_two_processes_refuses(config, tmp_path):
    said = load_config(config)
    with store.open_store(said.output, runner.describe(said)):
        done = command("run", str(config))
    assert done.returncode == 1
    assert done.stderr == f"error: another run is writing to {said.output}: wait for it, or name another output.\n"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run(
        [sys.executable, "-m", "attnprobe.cli.main", "bench", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        encoding="utf-8",
    )


def test_the_prompts_of_a_run_are_shown(tmp_path, model):
    data = tmp_path / "first.jsonl"
    path = write_config(tmp_path, model, tasks=[task(data, "first", template="Q: {question} A: {answer}", shots=2)])
    done = run("prompts", path, "-n", "2")
    assert done.exit_code == 0, done.output
    heads = [line for line in done.stdout.splitlines() if line.startswith("---")]
    assert [line.split(";")[0] for line in heads] == ["--- first, q2", "--- first, q3"]
    assert done.stdout.count("Q: ") == 6
    assert done.stdout.splitlines()[3].endswith(" A:")
    assert not (tmp_path / "out").exists()


OWN = """
import attnprobe as ap

class Own(ap.Recurrent):
    name, signal = "Own", "self_attention"

    def analyzers(self):
        return [ap.SelfAttention(final=False, trace=True)]

class Nameless(Own):
    name = None

nothing = 3
"""


def test_a_score_of_ones_own_is_named_by_its_place(tmp_path, model, monkeypatch):
    (tmp_path / "own_scores.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    methods = ["own_scores:Own", {"name": "own_scores:Own", "alpha": 0.5, "label": "half"}, "Perplexity"]
    path = write_config(tmp_path, model, rows=5, methods=methods)
    done = run("run", path)
    assert done.exit_code == 0, done.output
    frame = runner.results(tmp_path / "out").frame
    assert frame[["Own", "half", "Perplexity"]].notna().all().all()
    assert (frame["Own"] != frame["half"]).any()
    for wrong, said in (
        ("own_scores:nothing", "is no class of scores"),
        ("own_scores:Nameless", "has no name"),
        ("own_scores:Missing", "cannot be imported"),
        ("no_such_scores:Own", "cannot be imported: ModuleNotFoundError"),
    ):
        failed = run("run", write_config(tmp_path, model, methods=[wrong]))
        assert failed.exit_code == 2
        assert said in failed.stderr


def test_a_report_of_half_a_run_says_so(tmp_path, model):
    path = write_config(tmp_path, model, rows=9)
    runner.run(path)
    done = run("report", tmp_path / "out", "--resamples", "20")
    assert "rows are there" not in done.output
    parts = sorted((tmp_path / "out" / "rows").glob("part-*.parquet"))
    for part in parts[1:]:
        part.unlink()
    done = run("report", tmp_path / "out", "--resamples", "20")
    assert done.exit_code == 0, done.output
    assert "first: 4 of 9 rows are there. The longest prompts are asked first" in done.output
    assert "second: there are no answers yet." in done.output


def test_what_cannot_be_written_is_told_first(output, tmp_path, model):
    done = run("report", output, "--csv", tmp_path / "none" / "x.csv")
    assert done.exit_code == 2
    assert "there is no folder" in done.stderr
    (tmp_path / "taken").write_text("")
    failed = run("run", write_config(tmp_path, model, output=str(tmp_path / "taken")))
    assert failed.exit_code == 2
    assert "is a file, or lies in one: name a folder" in failed.stderr
    labelled = write_config(tmp_path, model, methods=[{"name": "SAUQ", "label": "text"}])
    failed = run("run", labelled)
    assert failed.exit_code == 2
    assert "run.yaml': methods: a method cannot be called 'text'" in failed.stderr


def test_empty_answers_are_said(tmp_path, model, monkeypatch):
    done = runner.run(write_config(tmp_path, model, rows=5))
    frame = done.frame.copy()
    frame.loc[frame.index[:2], "text"] = ["", " \n"]
    done.__dict__["frame"] = frame
    assert done.empty == 2
    assert "; 2 answers are empty (does the model expect its chat template" in str(done)


# --- report -----------------------------------------------------------------------------------------------


def test_a_report_is_printed(output):
    done = run("report", output)
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[0].startswith("Prediction rejection ratio of ")
    assert lines[0].endswith(", with 90 % intervals")
    assert lines[1].split() == ["method", "first", "second"]
    assert [line.split()[0] for line in lines[2:5]] == list(METHODS)
    assert any(line.startswith("Difference from SAUQ") for line in lines)
    answers = lines.index("Answers")
    assert lines[answers + 2].split()[:3] == ["first", "21", "0"]
    assert not [line for line in lines if line.startswith("Published")]


def test_a_report_is_written(output, tmp_path):
    files = {name: tmp_path / f"report.{name}" for name in ("csv", "md", "tex")}
    done = run(
        "report", output, "--csv", files["csv"], "--markdown", files["md"], "--latex", files["tex"],
        "--baseline", "RAUQ", "--max-rejection", 1.0, "--level", 0.8,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(files["csv"])
    assert len(frame) == 6
    assert frame.loc[frame["method"] == "RAUQ", "difference"].isna().all()
    assert "with 80 % intervals" in files["md"].read_text()
    assert files["tex"].read_text().startswith("\\begin{table}")
    assert "At most 100 % of the answers are rejected." in done.stdout


def test_mistakes_in_a_report(output, tmp_path):
    one_sentence(run("report"), 2, "Missing argument")
    one_sentence(run("report", tmp_path / "nowhere"), 2, "holds no results")
    one_sentence(run("report", output, "--baseline", "x"), 2, "baseline 'x' is not among the methods")
    one_sentence(run("report", output, "--max-rejection", 2), 2, "max_rejection is 2.0")
    one_sentence(run("report", output, "--metric", "f1"), 2, "there is no metric 'f1'")
    one_sentence(run("report", output, "--csv", tmp_path / "no" / "folder.csv"), 2, "there is no folder")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["report", "--help"]])
def test_help_is_light(arguments):
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "from attnprobe.cli.main import main\n"
        f"sys.argv = ['attnprobe', 'bench', *{arguments!r}]\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'pyarrow', 'ray', 'attnprobe.bench'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stderr


def test_reporting_needs_no_torch(output):
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "from attnprobe.bench.reporting import report\n"
        f"report({str(output)!r}, resamples=9, permutations=9).to_markdown()\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.stdout == "[]\n", done.stderr
