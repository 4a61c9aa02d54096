"""Results on disk: whole parts or none, one writer, nothing twice, and every way a folder can be wrong."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import sys

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow", reason="the benchmark's packages are not installed")

from attnprobe.bench import store as module
from attnprobe.bench.store import Record, Row, differences, open_store, read_record, read_rows

METHODS = ("SAUQ", "Perplexity")


def record(**changes) -> Record:
    values = dict(
        config={"model": "a", "tasks": [{"task": "T", "max_new_tokens": 3}], "output": "x"},
        fingerprint="one",
        methods=METHODS,
        tasks=("T",),
        model="a",
        versions=({"torch": "1"},),
    )
    return Record(**{**values, **changes})


def row(identity: str, task: str = "T", **changes) -> Row:
    values = dict(
        prompt_tokens=5,
        tokens=2,
        text=f"answer {identity}",
        finish="eos",
        quality=0.5,
        seconds=0.1,
        scores={"SAUQ": 1.25, "Perplexity": 0.1},
    )
    return Row(task, identity, **{**values, **changes})


def frame(folder) -> pd.DataFrame:
    return read_rows(folder).frame(METHODS)


def names(folder) -> list[str]:
    return sorted(path.name for path in (folder / "rows").iterdir())


# --- what goes in comes out -------------------------------------------------------------------------------


def test_rows_come_back_as_they_were(tmp_path):
    failed = Row("T", "2", error="prompt too long", seconds=0.5)
    with open_store(tmp_path, record()) as store:
        assert store.append([row("1"), failed]) == 2
        assert store.append([row("1", task="U", quality=1.0, scores={"SAUQ": float("inf"), "Perplexity": 1e-300})]) == 1
        assert store.done == {("T", "1"), ("T", "2"), ("U", "1")}
    found = frame(tmp_path)
    assert list(found.columns) == [*module.COLUMNS, *METHODS]
    assert found["id"].tolist() == ["1", "2", "1"]
    assert found["SAUQ"].tolist()[::2] == [1.25, float("inf")]
    assert found["Perplexity"].dtype == "float64"
    assert found["Perplexity"].tolist()[::2] == [0.1, 1e-300]
    assert found.loc[1, ["prompt_tokens", "tokens", "text", "finish", "quality", *METHODS]].isna().all()
    assert found["error"].tolist()[1] == "prompt too long"
    assert found["error"].isna().tolist() == [True, False, True]
    # the folder is a data set to any reader of Parquet
    whole = pd.read_parquet(tmp_path / "rows")
    assert whole["id"].tolist() == ["1", "2", "1"]
    assert names(tmp_path) == ["part-000001.parquet", "part-000002.parquet"]


def test_a_row_that_is_there_is_not_written_again(tmp_path):
    with open_store(tmp_path, record()) as store:
        assert store.append([row("1"), row("1", text="other")]) == 1
        assert store.append([row("1", text="other")]) == 0
        assert store.append([]) == 0
    with open_store(tmp_path, record()) as store:
        assert store.done == {("T", "1")}
        assert store.append([row("1", text="other"), row("2")]) == 1
    assert frame(tmp_path)["text"].tolist() == ["answer 1", "answer 2"]


TEXTS = st.text(st.characters(), max_size=20) | st.sampled_from(
    ["\ud800", "\x00", "\x1b[2J", "\u202e", "a,b\n\"c'", "日本", "👩‍🔬", "NaN", "None", "", "../../x", "x" * 5000]
)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6))
def test_any_text_is_kept(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("store")
    with open_store(folder, record()) as store:
        store.append([row(identity, text=text, error=None) for identity, text in pairs])
    found = frame(folder)
    first = {identity.encode("utf-8", "backslashreplace"): text for identity, text in reversed(pairs)}
    assert [one.encode() for one in found["id"]] == list(
        dict.fromkeys(identity.encode("utf-8", "backslashreplace") for identity, _ in pairs)
    )
    for identity, text in zip(found["id"], found["text"], strict=True):
        assert text.encode() == first[identity.encode()].encode("utf-8", "backslashreplace")


def test_numbers_are_kept_to_the_last_bit(tmp_path):
    values = [0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308]
    with open_store(tmp_path, record(methods=("m",))) as store:
        store.append([row(str(i), scores={"m": value}) for i, value in enumerate(values)])
    assert [value.hex() for value in read_rows(tmp_path).frame(["m"])["m"]] == [value.hex() for value in values]


@pytest.mark.parametrize("methods", [("text",), ("a", "a"), ("quality", "b")])
def test_methods_need_names_of_their_own(tmp_path, methods):
    with pytest.raises(ValueError, match="label"), open_store(tmp_path, record(methods=methods)):
        pass


def test_a_new_folder_has_no_rows(tmp_path):
    with open_store(tmp_path / "deep" / "new", record()) as store:
        assert store.done == set()
    assert frame(tmp_path / "deep" / "new").empty
    assert list(frame(tmp_path / "deep" / "new").columns) == [*module.COLUMNS, *METHODS]


# --- the record -------------------------------------------------------------------------------------------


def test_the_record_comes_back(tmp_path):
    said = record(config={"model": "日本", "x": None}, model="日本")
    with open_store(tmp_path, said):
        pass
    assert read_record(tmp_path) == said


def test_other_settings_are_refused_and_named(tmp_path):
    with open_store(tmp_path, record()):
        pass
    changed = {"model": "b", "tasks": [{"task": "T", "max_new_tokens": 4}], "output": "elsewhere"}
    with (
        pytest.raises(ValueError, match="rows of other settings") as caught,
        open_store(tmp_path, record(config=changed, fingerprint="two")),
    ):
        pass
    said = str(caught.value)
    assert 'model: "a" is now "b"' in said
    assert "tasks[0].max_new_tokens: 3 is now 4" in said
    assert "elsewhere" not in said
    with pytest.raises(ValueError, match="files of data has changed"), open_store(tmp_path, record(fingerprint="two")):
        pass
    with open_store(tmp_path, record(config={**record().config, "output": "elsewhere"})):
        pass  # what changes no row is no difference


def test_other_versions_are_noted_and_kept(tmp_path):
    with open_store(tmp_path, record()):
        pass
    with open_store(tmp_path, record(versions=({"torch": "2"},))) as store:
        assert store.notices == ['the rows that are there were written by other versions (torch: "1" is now "2").']
    with open_store(tmp_path, record(versions=({"torch": "2"},))) as store:
        assert store.notices == []
    assert read_record(tmp_path).versions == ({"torch": "1"}, {"torch": "2"})


def test_differences_are_short():
    assert differences({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1], "c": None}) == ["b: [1, 2] is now [1]"]
    (said,) = differences({"template": "x" * 500}, {"template": "y" * 500})
    assert len(said) < 200


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 99}', '{"format": 1, "config": 3}']
)
def test_a_damaged_record_is_one_sentence(tmp_path, content):
    with open_store(tmp_path, record()):
        pass
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json"), open_store(tmp_path, record()):
        pass
    with pytest.raises(ValueError, match=r"run\.json"):
        read_record(tmp_path)


def test_folders_that_are_no_run(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="holds no results"):
            read_record(folder)
    with open_store(tmp_path, record()) as store:
        store.append([row("1")])
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"holds rows and no run\.json"), open_store(tmp_path, record()):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file, or lies in one"), open_store(tmp_path / "file", record()):
        pass


# --- damage -----------------------------------------------------------------------------------------------


def flip(data: bytes) -> bytes:
    # in a page of numbers: the checksum of the page is what finds it
    place = data.index(b"answer 3") + 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-4], lambda data: b"PAR1" * 99, flip],
)
def test_a_damaged_part_is_set_aside_and_done_again(tmp_path, damage):
    with open_store(tmp_path, record()) as store:
        for identity in "123":
            store.append([row(identity), row(identity + "b")])
    last = tmp_path / "rows" / "part-000003.parquet"
    last.write_bytes(damage(last.read_bytes()))
    found = read_rows(tmp_path)
    assert [path.name for path in found.damaged] == ["part-000003.parquet"]  # and nothing is changed by looking
    assert found.table.num_rows == 4
    with open_store(tmp_path, record()) as store:
        assert store.done == {("T", "1"), ("T", "1b"), ("T", "2"), ("T", "2b")}
        (notice,) = store.notices
        assert notice.startswith("part-000003.parquet is damaged: it is kept as _damaged-part-000003.parquet")
        assert store.append([row("3"), row("3b")]) == 2
    assert names(tmp_path) == [
        "_damaged-part-000003.parquet",
        "part-000001.parquet",
        "part-000002.parquet",
        "part-000004.parquet",
    ]
    assert frame(tmp_path)["id"].tolist() == ["1", "1b", "2", "2b", "3", "3b"]
    assert len(pd.read_parquet(tmp_path / "rows")) == 6


def test_a_part_that_is_there_twice_counts_once(tmp_path):
    with open_store(tmp_path, record()) as store:
        store.append([row("1"), row("2")])
    part = tmp_path / "rows" / "part-000001.parquet"
    (tmp_path / "rows" / "part-000007.parquet").write_bytes(part.read_bytes())
    assert frame(tmp_path)["id"].tolist() == ["1", "2"]
    with open_store(tmp_path, record()) as store:
        assert store.notices == ["2 rows are there more than once: the first of each counts."]
        store.append([row("3")])
    assert "part-000008.parquet" in names(tmp_path)


def test_a_part_of_other_columns_is_set_aside(tmp_path):
    with open_store(tmp_path / "other", record(methods=("m",))) as store:
        store.append([row("9", scores={"m": 1.0})])
    with open_store(tmp_path / "own", record()) as store:
        store.append([row("1")])
    stranger = (tmp_path / "other" / "rows" / "part-000001.parquet").read_bytes()
    (tmp_path / "own" / "rows" / "part-000002.parquet").write_bytes(stranger)
    with open_store(tmp_path / "own", record()) as store:
        assert store.done == {("T", "1")}
        assert "damaged" in store.notices[0]


def test_failed_rows_are_forgotten_on_demand(tmp_path):
    with open_store(tmp_path, record()) as store:
        store.append([row("1"), Row("T", "2", error="no")])
        store.append([Row("T", "3", error="no")])
        assert store.forget_failed() == 2
        assert store.done == {("T", "1")}
        assert store.forget_failed() == 0
        store.append([row("2"), row("3")])
    assert frame(tmp_path)["id"].tolist() == ["1", "2", "3"]
    assert frame(tmp_path)["error"].isna().all()


# --- a full disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, step):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(table, path):
        path.write_bytes(b"PAR1 and then the disk was full")
        full()

    with open_store(tmp_path, record()) as store:
        store.append([row("1")])
        with monkeypatch.context() as patch:
            if step == "write":
                patch.setattr(module, "_write_parquet", half)
            else:
                patch.setattr(module.os, step, full)
            with pytest.raises(OSError, match="No space left on device") as caught:
                store.append([row("2")])
        assert caught.value.errno == errno.ENOSPC
        assert "\n" not in str(caught.value)
        assert "the same command goes on" in str(caught.value)
        assert names(tmp_path) == ["part-000001.parquet"]
        assert store.done == {("T", "1")}
        assert store.append([row("2")]) == 1
    assert frame(tmp_path)["id"].tolist() == ["1", "2"]


# --- one writer, and death at any step --------------------------------------------------------------------


def test_two_writers_refuse_each_other(tmp_path):
    with open_store(tmp_path, record()):
        with pytest.raises(RuntimeError, match="another run is writing to"), open_store(tmp_path, record()):
            pass
        with (
            pytest.raises(RuntimeError, match="another run is writing to"),
            open_store(tmp_path, record(fingerprint="b")),
        ):
            pass
    with open_store(tmp_path, record()):
        pass


fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


def in_a_child(function) -> int:
    """Run a function in a forked process; its exit code, negative for a signal."""
    child = multiprocessing.get_context("fork").Process(target=function)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def dies_at(step: str, call: int):
    """Make this process kill itself at the n-th call of a step, before it is done."""
    holder = module if step.startswith("_") else os
    original, calls = getattr(holder, step), 0

    def deadly(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            if step == "_write_parquet":
                args[1].write_bytes(b"half a part")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(holder, step, deadly)


@fork
@pytest.mark.parametrize("call", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("step", ["_write_parquet", "fsync", "replace", "_flush_folder"])
def test_killed_at_any_step_no_row_is_lost_or_doubled(tmp_path, step, call):
    def work():
        dies_at(step, call)
        with open_store(tmp_path, record()) as store:
            for identity in "12345":
                store.append([row(identity), row(identity + "b")])

    code = in_a_child(work)
    assert code == (0 if step == "_write_parquet" and call == 6 else -signal.SIGKILL)
    with open_store(tmp_path, record()) as store:  # the lock of the dead does not block
        assert store.notices == []
        kept = len(store.done)
        assert kept % 2 == 0
        for identity in "12345":
            store.append([row(identity), row(identity + "b")])
    found = frame(tmp_path)
    assert sorted(found["id"]) == sorted([*"12345", *(f"{i}b" for i in "12345")])
    assert not [name for name in names(tmp_path) if not name.startswith("part-")]
    assert json.loads((tmp_path / "run.json").read_text())["fingerprint"] == "one"


@fork
def test_killed_while_failed_rows_are_taken_out(tmp_path):
    with open_store(tmp_path, record()) as store:
        for identity in "123":
            store.append([row(identity), Row("T", identity + "b", error="no")])

    def work():
        dies_at("replace", 2)
        with open_store(tmp_path, record()) as store:
            store.forget_failed()

    assert in_a_child(work) == -signal.SIGKILL
    with open_store(tmp_path, record()) as store:
        assert store.done == {("T", "1"), ("T", "2"), ("T", "3"), ("T", "2b"), ("T", "3b")}
        assert store.forget_failed() == 2
    assert frame(tmp_path)["id"].tolist() == ["1", "2", "3"]
