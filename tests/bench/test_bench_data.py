"""Files of rows: the three kinds agree, and a file that is not what it says is one sentence."""

import csv
import json
import sys
import types

import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attnprobe.bench.builtin import BUILT_IN
from attnprobe.bench.config import TaskConfig
from attnprobe.bench.data import is_file_name, read_table
from attnprobe.bench.tasks import examples

ROWS = [
    {
        "id": "007",
        "question": 'Who said "NA"?',
        "references": ["None", "Ada, Bob"],
        "context": "A line.\nAnother\u2028one.",
    },
    {"id": "1e5", "question": "  Wo ist Köln? {answer}", "references": ["[1]", "2"], "context": " "},
    {"id": "x", "question": "null", "references": ["NaN"], "context": "a\r\nb, c\t"},
    {"id": "y", "question": "日本?", "references": ["  1990 "], "context": "[not a list]"},
]
SETTINGS = dict(task="Mine", template="{context}\n{question}", quality="contains")


def jsonl(path, rows, encoding="utf-8", newline="\n"):
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + newline for row in rows).encode(encoding))


def as_csv(path, rows, encoding="utf-8", newline="\n"):
    with open(path, "w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator=newline)
        writer.writeheader()
        for row in rows:
            writer.writerow({key: json.dumps(cell) if isinstance(cell, list) else cell for key, cell in row.items()})


def parquet(path, rows):
    pd.DataFrame(rows).to_parquet(path)


def written(folder, kind, rows=ROWS, **how):
    path = folder / f"rows.{kind}"
    {"jsonl": jsonl, "csv": as_csv, "parquet": parquet}[kind](path, rows, **how)
    return path


def asked(path, **changes):
    return examples(TaskConfig(**{**SETTINGS, "data": str(path), **changes}))


def test_the_three_kinds_of_files_give_equal_examples(tmp_path):
    expected = asked(written(tmp_path, "jsonl"))
    assert [example.id for example in expected] == ["007", "1e5", "x", "y"]
    assert expected[0].references == ("None", "Ada, Bob")
    assert expected[1].prompt == " \nWo ist Köln? {answer}"
    assert expected[3].source == "[not a list]"
    assert asked(written(tmp_path, "csv")) == expected
    assert asked(written(tmp_path, "parquet")) == expected


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("how", [{"encoding": "utf-8-sig"}, {"newline": "\r\n"}])
def test_byte_order_marks_and_line_ends_change_nothing(tmp_path, kind, how):
    expected = asked(written(tmp_path, kind))
    assert asked(written(tmp_path, kind, **how)) == expected


def test_numbers_are_read_as_they_are_written(tmp_path):
    rows = [{"id": 7, "question": "How many?", "references": [64, 0.5], "context": "x"}]
    for kind in ("jsonl", "csv"):
        (example,) = asked(written(tmp_path, kind, rows))
        assert (example.id, example.references) == ("7", ("64", "0.5"))


def test_long_cells_of_csv(tmp_path):
    limit = csv.field_size_limit()
    rows = [{**ROWS[0], "context": "word " * 50_000}, ROWS[1]]
    assert asked(written(tmp_path, "csv", rows)) == asked(written(tmp_path, "jsonl", rows))
    assert csv.field_size_limit() == limit


def test_blank_lines_of_jsonl_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(ROWS[0]) + "\n\n  \n" + json.dumps(ROWS[1]))
    assert len(asked(path)) == 2


def test_a_kind_is_told_by_its_name_whatever_its_case(tmp_path):
    path = written(tmp_path, "csv")
    assert asked(path.rename(tmp_path / "ROWS.CSV")) == asked(written(tmp_path, "jsonl"))
    assert not is_file_name("owner/name")


BAD_FILES = {
    "empty.jsonl": (b"", "has no rows"),
    "blank.jsonl": (b"\n \n", "has no rows"),
    "empty.csv": (b"", "has no rows"),
    "header.csv": (b"id,question\n", "has no rows"),
    "empty.parquet": (b"", "not a Parquet file"),
    "csv.jsonl": (b"id,question\n1,x\n", "line 1 of .*csv.jsonl' is not JSON"),
    "list.jsonl": (b"[1, 2]\n", "line 1 of .* is no JSON object but a list"),
    "array.jsonl": (b'[\n{"id": 1}\n]', "line 1 of .* is not JSON"),
    "cut.jsonl": (
        b'{"id": 1, "question": "x", "context": "", "references": ["a"]}\n{"id": 2, "que',
        "line 2 .* not JSON",
    ),
    "deep.jsonl": (b"[" * 100000, "line 1 of .* is not JSON"),
    "latin.jsonl": ('{"question": "Köln"}'.encode("latin-1"), "is not UTF-8 text"),
    "utf16.csv": ("id,question\n1,x\n".encode("utf-16"), "is not UTF-8 text"),
    "gzip.csv": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "is not UTF-8 text"),
    "jsonl.csv": (b'{"id": "1", "question": "x"}\n{"id": "2", "question": "x"}\n', "is missing"),
    "jsonl.parquet": (b'{"id": "1", "question": "x"}\n' * 10, "not a Parquet file"),
    "long.csv": (b"id,question\n1,x\n2,y,z\n", "line 3 of .* has 3 cells, and the first line names 2"),
    "all_long.csv": (b"id,question\n1,x,u\n2,y,z\n", "line 2 of .* has 3 cells"),
    "short.csv": (b"id,question,context\n1,x\n", "line 2 of .* has 2 cells, and the first line names 3"),
    "twice.csv": (b"id,id\n1,x\n", "a column twice"),
    "quote.csv": (b'id,question\n1,"x\n', "not a CSV file that can be read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_not_what_it_says(tmp_path, name):
    content, expected = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected) as caught:
        asked(path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_truncated_parquet_file(tmp_path, part):
    path = written(tmp_path, "parquet")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(ValueError, match="not a Parquet file that can be read"):
        asked(path)


def test_a_damaged_parquet_file(tmp_path):
    path = written(tmp_path, "parquet", ROWS * 50)
    content = bytearray(path.read_bytes())
    content[20:200] = bytes(180)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.parquet"):
        asked(path)


def test_a_file_that_is_gone_or_is_a_folder(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    for name in ("gone.jsonl", "gone.csv", "gone.parquet", "folder.csv"):
        with pytest.raises(ValueError, match="read"):
            asked(tmp_path / name)


BAD_ROWS = [
    ({"question": None}, r"row 2 of .*\(id '1e5'\): question is missing: it should be in the column 'question'"),
    ({"question": ["x"]}, r"\(id '1e5'\): question is a list where a text should be"),
    ({"question": True}, "question is a bool"),
    ({"question": {"a": 1}}, "question is a dict"),
    ({"question": float("nan")}, "question is a float"),
    ({"question": "\ud800"}, "question holds half a character"),
    ({"references": None}, "references is missing"),
    ({"references": []}, "references has no answer"),
    ({"references": ["", "  "]}, "references has no answer"),
    ({"references": ["a", None]}, "references holds something that is no text"),
    ({"references": [["a"]]}, "references holds something that is no text"),
    ({"references": {"a": "b"}}, "references holds something that is no text"),
    ({"context": None}, "context is missing"),
]


@pytest.mark.parametrize(("change", "expected"), BAD_ROWS)
def test_a_row_that_lacks_something_is_named(tmp_path, change, expected):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, **(change if i == 1 else {})}) + "\n" for i, row in enumerate(ROWS)))
    with pytest.raises(ValueError, match=expected) as caught:
        asked(path)
    assert "\n" not in str(caught.value)


def test_a_column_of_another_name_and_one_inside_another(tmp_path):
    rows = [{"q": "Who?", "gold": {"all": ["Ada"]}, "key": 3, "context": "x", "a.b": "dot"}]
    path = written(tmp_path, "jsonl", rows)
    fields = {"question": "q", "references": "gold.all", "id": "key", "extra": "a.b"}
    (example,) = asked(path, fields=fields, template="{question} {extra}")
    assert (example.id, example.prompt, example.references) == ("3", "Who? dot", ("Ada",))
    with pytest.raises(ValueError, match=r"in the column 'gold\.some', and the row has a\.b, context, gold, key, q"):
        asked(path, fields={**fields, "references": "gold.some"}, template="{question} {extra}")


# --- anything at all ---------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
COLUMNS = ("id", "question", "context", "references", "choices", "answer", "subject", "story", "questions", "answers")
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def examples_or_a_sentence(path, name):
    try:
        asked = examples(TaskConfig(task=name, data=str(path), quality="contains", shots=0))
    except ValueError as error:
        sentence = str(error)
    else:
        assert all(example.references and example.prompt for example in asked)
        return
    assert path.name in sentence
    assert "\n" not in sentence
    assert len(sentence) < 1000


@FUZZ
@given(
    st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(COLUMNS, JSON)), max_size=3),
    st.sampled_from(sorted(BUILT_IN)),
)
def test_any_rows_are_examples_or_one_sentence(tmp_path, rows, name):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples_or_a_sentence(path, name)


@FUZZ
@given(st.binary() | st.text().map(str.encode), st.sampled_from(["csv", "jsonl", "parquet"]))
@example(b"id,question,context,references\n,,,\n", "csv")
@example(b'id,"ques\n\ntion"\n1,2\n', "csv")
@example(b",".join(b"column%d" % i for i in range(500)) + b"\n" + b"," * 499, "csv")
@example(b"PAR1PAR1", "parquet")
@example(b"PAR1\x00\x00\x00\x00PAR1", "parquet")
@example(b"\x00", "csv")
@example(b"1" * 5000, "jsonl")
def test_any_bytes_are_examples_or_one_sentence(tmp_path, content, kind):
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(content)
    examples_or_a_sentence(path, "SQuAD")


# --- the hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A hub that notes what it is asked for, in place of the network."""
    library = types.ModuleType("datasets")
    library.asked, library.rows = [], {}

    def load_dataset(*arguments, **options):
        library.asked.append((arguments, options))
        if options["split"] not in library.rows:
            raise ConnectionError("Couldn't reach the hub.\nMore about it.")
        return library.rows[options["split"]]

    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    return library


def test_the_hub_is_asked_for_rows_and_never_to_run_anything(hub):
    hub.rows["test"] = [{"id": 1, "document": "Text.", "summary": "Short."}]
    (example,) = examples(TaskConfig(task="XSum"))
    assert hub.asked == [(("EdinburghNLP/xsum", None), {"split": "test"})]
    assert (example.id, example.source, example.references) == ("1", "Text.", ("Short.",))


def test_a_hub_that_cannot_be_reached(hub):
    with pytest.raises(ValueError, match=r"cannot be read from the hub: Couldn't reach the hub; a file") as caught:
        read_table("owner/name", None, "nothing")
    assert "\n" not in str(caught.value)


def test_a_real_data_set_of_the_library_is_read(tmp_path, monkeypatch):
    import datasets

    rows = [
        {"question_id": f"q{i}", "question": f"Q{i}?", "answer": {"aliases": [f"a{i}"], "normalized_value": f"n{i}"}}
        for i in range(9)
    ]
    whole = datasets.Dataset.from_list(rows)
    splits = {"validation": whole.select(range(2)), "train": whole.select(range(2, 9))}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: splits[split])
    first, second = examples(TaskConfig(task="TriviaQA", shuffle_seed=None))
    assert (first.id, first.references) == ("q0", ("a0",))
    assert first.prompt.count("Answer:n") == 5
    assert second.prompt.endswith("Question: Q1?\nAnswer:")


def test_a_missing_package_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'pip install "attnprobe\[bench\]"'):
        read_table("owner/name", None, "test")
    path = written(tmp_path, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'pip install "attnprobe\[bench\]"'):
        asked(path)
