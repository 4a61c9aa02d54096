"""Whole runs on a tiny model: rows and numbers, failures, interruptions, and going on where a run ended."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import random
import signal
import sys
import time

import pandas as pd
import pytest
import torch

pytest.importorskip("pyarrow", reason="the benchmark's packages are not installed")
pytest.importorskip("pydantic", reason="the benchmark's packages are not installed")
pytest.importorskip("yaml", reason="the benchmark's packages are not installed")

from bench import small_run
from bench.small_run import CONTEXT, METHODS, comparable, save_model, task, write_config

import attnprobe as ap
from attnprobe.bench import engine, progress, runner, store
from attnprobe.bench.config import load_config
from attnprobe.bench.example import Example
from attnprobe.bench.runner import results, run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path, model):
    return write_config(tmp_path, model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    """The rows of a run that nothing disturbed."""
    path = write_config(tmp_path_factory.mktemp("whole"), model)
    return comparable(run(path).frame)


@pytest.fixture
def batches_seen(monkeypatch):
    """The prompts of every call of `attnprobe.score`."""
    seen: list[list[str]] = []
    original = ap.score

    def score(model, prompts, **settings):
        seen.append(list(prompts))
        return original(model, prompts, **settings)

    monkeypatch.setattr(ap, "score", score)
    return seen


# --- a run ------------------------------------------------------------------------------------------------


def test_every_example_has_its_row_and_the_numbers_of_score(whole, model):
    assert len(whole) == 31
    assert whole["error"].isna().all()
    assert whole["task"].value_counts().to_dict() == {"first": 21, "second": 10}
    questions = {row["id"]: row["question"] for row in map(json.loads, data(model).read_text().splitlines())}
    loaded = ap.load_model(model, host="transformers", device="cpu")
    for row in whole[whole["task"] == "first"].itertuples(index=False):
        (score,) = ap.score(loaded, questions[row.id], methods=METHODS, max_new_tokens=4, stop="\n")
        assert (row.text, row.finish, row.tokens) == (score.text, score.finish, len(score.token_ids))
        assert row.prompt_tokens == len(questions[row.id].split())
        assert 0 <= row.quality <= 1
        for method in METHODS:  # a batch computes in another order
            assert getattr(row, method) == pytest.approx(score.uncertainty[method], rel=1e-5, abs=1e-5)
    assert whole["quality"].nunique() > 1


def data(folder):
    """The rows of the first task once more."""
    return small_run.save_rows(folder / "again.jsonl", 21)


def test_the_results_say_what_was_run(config):
    found = run(config)
    assert (found.rows, found.new, found.failed, found.first_error, found.notices) == (31, 31, 0, None, ())
    assert str(found) == f"31 rows in {found.output} (31 of them new)."
    said = json.loads((found.output / "run.json").read_text())
    assert said["methods"] == list(METHODS)
    assert said["tasks"] == ["first", "second"]
    assert said["fingerprint"] == load_config(config).fingerprint()
    assert said["model"] == load_config(config).model
    assert {"attnprobe", "torch", "transformers", "transformer-lens"} <= set(said["versions"][0])
    again = results(found.output)
    assert again.record == found.record
    pd.testing.assert_frame_equal(again.frame, found.frame)


def test_batches_hold_prompts_of_one_length_the_longest_first(config, batches_seen):
    run(config)
    first = batches_seen[:6]
    assert [len(batch) for batch in first] == [4, 4, 4, 4, 4, 1]
    lengths = [len(prompt) for batch in first for prompt in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_methods_with_settings_have_columns_of_their_own(tmp_path, model):
    methods = ["SAUQ", {"name": "SAUQ", "measure": "counting", "label": "SAUQ | counting"}]
    found = run(write_config(tmp_path, model, rows=4, methods=methods))
    assert list(found.frame.columns[-2:]) == ["SAUQ", "SAUQ | counting"]
    assert (found.frame["SAUQ"] != found.frame["SAUQ | counting"]).any()


def test_a_run_that_is_complete_loads_no_model(config, monkeypatch):
    run(config)
    monkeypatch.setattr(ap, "load_model", lambda *args, **kwargs: pytest.fail("loaded"))
    again = run(config)
    assert (again.rows, again.new) == (31, 0)


def test_limit_takes_the_first_of_every_task_and_a_later_run_the_rest(config, whole, batches_seen):
    part = run(config, limit=3)
    assert sorted(part.frame["id"]) == ["q0", "q0", "q1", "q1", "q2", "q2"]
    assert run(config, limit=2).new == 0
    rest = run(config)
    assert (rest.rows, rest.new) == (31, 25)
    assert sum(map(len, batches_seen)) == 31
    close(comparable(rest.frame), whole)


def close(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Equal but for the rounding of batches of another composition."""
    pd.testing.assert_frame_equal(found, expected, check_exact=False, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_a_mistake(config, limit):
    with pytest.raises(ValueError, match="limit"):
        run(config, limit=limit)


def test_other_settings_need_another_output(tmp_path, model, config):
    run(config, limit=1)
    changed = write_config(tmp_path, model, methods=["SAUQ"])
    with pytest.raises(ValueError, match=r"rows of other settings.*methods"):
        run(changed)


def test_other_data_needs_another_output(tmp_path, model, config):
    run(config, limit=1)
    small_run.save_rows(tmp_path / "first.jsonl", 21, seed=5)
    with pytest.raises(ValueError, match="files of data has changed"):
        run(config)


def test_the_size_of_batches_may_change(tmp_path, model, config, whole):
    run(config, limit=5)
    again = run(write_config(tmp_path, model, batch_size=3))
    assert again.new == 31 - 10
    close(comparable(again.frame), whole)


def test_two_runs_at_once(config):
    said = load_config(config)
    with store.open_store(said.output, runner.describe(said)), pytest.raises(RuntimeError, match="another run"):
        run(config)


# --- rows that fail ---------------------------------------------------------------------------------------


def hostile_rows(path, n: int = 6):
    rows = [{"id": f"q{i}", "question": "the cat", "references": ["cat"]} for i in range(n)]
    rows[2]["question"] = "cat " * CONTEXT
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_prompt_too_long_fails_alone(tmp_path, model):
    data = hostile_rows(tmp_path / "rows.jsonl")
    found = run(write_config(tmp_path, model, tasks=[task(data, "T")]))
    frame = found.frame.set_index("id")
    assert found.failed == 1
    assert frame.loc["q2", "error"].startswith(f"the prompt has {CONTEXT} tokens and makes {CONTEXT + 4}")
    assert frame.loc["q2", ["text", "quality", "tokens", *METHODS]].isna().all()
    others = frame.drop("q2")
    assert others["error"].isna().all()
    assert others[list(METHODS)].notna().all().all()
    assert "1 failed, the first of them so: the prompt has" in str(found)
    assert run(write_config(tmp_path, model, tasks=[task(data, "T")])).new == 0  # it is done, and stays so


def test_a_quality_that_fails_is_recorded_and_the_answer_kept(tmp_path, model):
    found = run(picky_config(tmp_path, model))
    frame = found.frame.set_index("id")
    said = "the quality 'bench.small_run:picky' of the example"
    assert frame["error"].dropna().to_dict() == {
        "q1": f"{said} 'q1' cannot be measured: 'no such key'",
        "q3": f"{said} 'q3' is nan, which is no finite number",
    }
    assert frame["quality"].isna().tolist() == frame["error"].notna().tolist()
    assert frame["text"].notna().all()
    assert frame[list(METHODS)].notna().all().all()


def picky_config(folder, model):
    data = small_run.save_rows(folder / "rows.jsonl", 6)
    return write_config(folder, model, tasks=[task(data, "T", quality="bench.small_run:picky")])


def test_failed_rows_are_done_again_on_demand(tmp_path, model, monkeypatch):
    path = picky_config(tmp_path, model)
    assert run(path).failed == 2
    monkeypatch.setattr(small_run, "FAILING", {"q3": 0.25})
    assert run(path).new == 0
    again = run(path, retry_failed=True)
    assert (again.new, again.failed, again.rows) == (2, 0, 6)
    assert again.notices == ("2 rows that had failed are done again.",)
    assert again.frame.set_index("id").loc["q3", "quality"] == 0.25


def test_a_score_that_is_no_number_fails_the_row(tmp_path, model, monkeypatch):
    original = ap.score

    def score(model, prompts, **settings):
        scores = original(model, prompts, **settings)
        scores[0].uncertainty["RAUQ"] = float("nan")
        return scores

    monkeypatch.setattr(ap, "score", score)
    found = run(write_config(tmp_path, model, rows=2, batch_size=2))
    assert found.frame["error"].dropna().tolist() == ["RAUQ gave no number."] * 2


def test_a_fault_of_one_row_is_named_by_its_kind(config, monkeypatch):
    original = ap.score

    def score(model, prompts, **settings):
        if any(len(prompt.split()) == 12 for prompt in prompts):
            raise AssertionError
        return original(model, prompts, **settings)

    monkeypatch.setattr(ap, "score", score)
    frame = run(config).frame
    assert set(frame["error"].dropna()) == {"AssertionError"}
    assert 0 < frame["error"].notna().sum() < len(frame)


def test_a_device_that_has_failed_ends_the_run_and_nothing_is_blamed_on_rows(config, monkeypatch, whole):
    original, calls = ap.score, []

    def score(model, prompts, **settings):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("CUDA error: device-side assert triggered\nand more\n")
        return original(model, prompts, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(ap, "score", score)
        with pytest.raises(RuntimeError, match=r"the device has failed \(CUDA error"):
            run(config)
    assert len(results(load_config(config).output).frame) == 8
    found = run(config)
    assert found.new == 23
    pd.testing.assert_frame_equal(comparable(found.frame), whole)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, "can't allocate memory: you tried"])
def test_too_little_memory_halves_the_batch(config, monkeypatch, whole, error):
    original, sizes = ap.score, []

    def score(model, prompts, **settings):
        sizes.append(len(prompts))
        if len(prompts) > 1:
            raise RuntimeError(error) if isinstance(error, str) else error("out of memory")
        return original(model, prompts, **settings)

    monkeypatch.setattr(ap, "score", score)
    monkeypatch.setattr("gc.collect", lambda: 0)  # slow beside everything that is imported here
    close(comparable(run(config).frame), whole)
    # A size that did not fit is not tried again with prompts as long.
    assert sizes[:7] == [4, 2, 1, 1, 1, 1, 2] or sizes[:7] == [4, 2, 1, 1, 2, 1, 1]
    assert sizes.count(4) < 8


def test_a_row_too_large_for_the_memory_is_recorded(tmp_path, model, monkeypatch):
    original = ap.score

    def score(model, prompts, **settings):
        if any(len(prompt) > 100 for prompt in prompts):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, prompts, **settings)

    monkeypatch.setattr(ap, "score", score)
    monkeypatch.setattr("gc.collect", lambda: 0)
    data = hostile_rows(tmp_path / "rows.jsonl")
    frame = run(write_config(tmp_path, model, tasks=[task(data, "T")])).frame
    assert frame["error"].dropna().tolist() == ["there is not enough memory even for this row alone."]


# --- methods that sample ----------------------------------------------------------------------------------


class Echo:
    """An NLI model for which texts say the same when they begin with the same word."""

    def matrix(self, texts):
        first = [(text.split() or [""])[0] for text in texts]
        same = torch.tensor([[a == b for b in first] for a in first]).double()
        return torch.stack([same * 5, torch.zeros_like(same), (1 - same) * 5], dim=-1)


def test_what_is_drawn_for_a_row_depends_on_nothing_else(tmp_path, model, monkeypatch):
    monkeypatch.setattr("attnprobe.uncertainty.sampled.shared_nli", lambda *name: Echo())
    methods = ["SAUQ", {"name": "SemanticEntropy", "n_samples": 4}]
    frames = []
    for folder, changes in (("a", {}), ("b", {"batch_size": 3}), ("c", {"seed": 1})):
        path = write_config(tmp_path / folder, model, rows=8, methods=methods, **changes)
        if folder == "b":
            run(path, limit=2)
        frames.append(comparable(run(path).frame))
    column = frames[0].columns[-1]
    assert frames[0]["error"].isna().all()
    pd.testing.assert_frame_equal(frames[0], frames[1])
    assert (frames[0][column] != frames[2][column]).any()


# --- interruptions ----------------------------------------------------------------------------------------


def test_an_interrupt_leaves_whole_batches(config, monkeypatch, whole):
    original, calls = ap.score, []

    def score(model, prompts, **settings):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(model, prompts, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(ap, "score", score)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    assert len(results(load_config(config).output).frame) == 12
    found = run(config)
    assert (found.new, found.rows) == (19, 31)
    pd.testing.assert_frame_equal(comparable(found.frame), whole)


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(config, monkeypatch, whole):
    original, calls = store._write_parquet, []

    def write(table, path):
        calls.append(1)
        if len(calls) == 3:
            path.write_bytes(b"PAR1")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(table, path)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write_parquet", write)
        with pytest.raises(OSError, match=r"No space left on device.*the same command goes on"):
            run(config)
    found = run(config)
    assert (found.new, found.rows, found.notices) == (23, 31, ())
    pd.testing.assert_frame_equal(comparable(found.frame), whole)


def test_a_damaged_part_is_done_again(config, whole):
    output = run(config).output
    (output / "rows" / "part-000002.parquet").write_bytes(b"")
    found = run(config)
    assert found.new == 4
    assert "damaged" in found.notices[0]
    pd.testing.assert_frame_equal(comparable(found.frame), whole)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_random_moments_every_row_is_there_once_with_its_numbers(config, whole, seed):
    # Forked, so that no time is spent on importing: what is killed is the run.
    generator, settings = random.Random(seed), load_config(config)
    for _ in range(4):
        child = forked(lambda: run(settings, progress=False))
        time.sleep(generator.uniform(0.05, 0.45))
        os.kill(child.pid, signal.SIGKILL)
        assert exit_code(child) in (0, -signal.SIGKILL)
    found = run(settings, progress=False)
    assert found.rows == 31
    assert found.notices == ()
    assert len(read_everything(settings.output)) == 31  # no part holds a row of another
    pd.testing.assert_frame_equal(comparable(found.frame), whole)


def forked(function):
    child = multiprocessing.get_context("fork").Process(target=function)
    child.start()
    return child


def exit_code(child) -> int:
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def read_everything(output) -> pd.DataFrame:
    """All rows of all parts, by pandas rather than by the library."""
    return pd.read_parquet(output / "rows")


# --- progress ---------------------------------------------------------------------------------------------


def test_nothing_is_printed_where_nobody_looks(config, capsys):
    run(config)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_a_task(config, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for show, expected in ((True, True), (False, False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with progress.Bars({"first": 4, "[b]\x1b[2J": 2}, {"first": 1}, show) as bars:
            bars.advance("first", 3)
        printed = terminal.getvalue()
        assert ("first" in printed) is expected
        assert ("4/4" in printed) is expected
        assert ("[b]\\x1b[2J" in printed) is expected


# --- pieces -----------------------------------------------------------------------------------------------


def test_batches_do_not_depend_on_what_is_done():
    examples = [Example(str(i), "x" * (i % 5 + 1), ("a",)) for i in range(11)]
    planned = engine.batches(0, examples, 4)
    assert [len(batch.examples) for batch in planned] == [4, 4, 3]
    done = {("T", example.id) for example in planned[0].examples} | {("T", planned[1].examples[0].id)}
    left = [runner._missing(batch, "T", done).examples for batch in planned]
    assert left == [(), planned[1].examples[1:], planned[2].examples]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a\n  b"), "a b"),
        (ValueError("prompt 0 has 3 tokens"), "the prompt has 3 tokens"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError(), "RuntimeError"),
        (ZeroDivisionError(), "ZeroDivisionError"),
    ],
)
def test_errors_are_one_sentence(error, said):
    assert engine.sentence(error) == said


def test_a_long_error_is_cut():
    assert len(engine.sentence(ValueError("x" * 99999))) == 1000


def test_examples_of_one_id_are_refused(config, monkeypatch):
    twice = [Example("q", "the cat", ("a",)), Example("q", "the dog", ("a",))]
    monkeypatch.setattr("attnprobe.bench.tasks.examples", lambda *args, **kwargs: twice)
    with pytest.raises(ValueError, match="two examples with the id 'q'"):
        run(config)


def test_a_run_in_which_all_failed_makes_way_for_other_settings(tmp_path, model):
    failed = runner.run(write_config(tmp_path, model, rows=5, methods=[{"name": "RAUQ", "layers": [99]}]))
    assert failed.failed == failed.rows > 0
    done = runner.run(write_config(tmp_path, model, rows=5))
    assert done.failed == 0
    assert "all rows of the last run had failed" in done.notices[0]
    aside = [path.name for path in (tmp_path / "out" / "rows").iterdir() if path.name.startswith("_failed-")]
    assert aside
    again = runner.run(write_config(tmp_path, model, rows=5))
    assert (again.new, again.rows) == (0, done.rows)
