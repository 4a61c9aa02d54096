"""Configurations: what is filled in, what is refused and with which sentence."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attnprobe import bench
from attnprobe.bench.builtin import BUILT_IN
from attnprobe.bench.config import ROW_NAMES, RunConfig, TaskConfig, load_config
from attnprobe.bench.config_errors import nearest
from attnprobe.bench.methods import build_method
from attnprobe.bench.quality import QUALITIES

ROW = '{"id": "1", "question": "Who?", "references": ["Ada"]}\n'
GOOD = """
methods: [SAUQ, Perplexity]
tasks: [{task: TriviaQA, data: rows.jsonl, quality: token_f1}]
output: out
"""
OWN = {"task": "Mine", "data": "rows.jsonl", "template": "{question}", "quality": "contains"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    return tmp_path


def write(folder: Path, text) -> Path:
    path = folder / "run.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


def said(**changes):
    """The good configuration with changes; None takes a key away."""
    both = {**yaml.safe_load(GOOD), **changes}
    return {key: value for key, value in both.items() if value is not None}


def task(**changes):
    return said(tasks=[{**yaml.safe_load(GOOD)["tasks"][0], **changes}])


def own(**changes):
    both = {**OWN, **changes}
    return said(tasks=[{key: value for key, value in both.items() if value is not None}])


# --- what is refused ---------------------------------------------------------------------------------------

WRONG = {
    "not yaml": ("methods: [SAUQ", "not a YAML file that can be read", "line"),
    "tag that runs code": ("methods: !!python/object/apply:os.system ['exit 1']", "tags that make objects", "line 1"),
    "tag that makes a name": ("methods: !!python/name:os.system ''", "tags that make objects"),
    "two documents": ("a: 1\n---\nb: 2", "not a YAML file"),
    "month 13": ("output: 2024-13-45", "not a YAML file that can be read"),
    "bad int tag": ("seed: !!int x", "not a YAML file that can be read"),
    "bad timestamp tag": ("seed: !!timestamp x", "not a YAML file that can be read"),
    "deep": ("[" * 1500, "not a YAML file that can be read"),
    "empty": ("", "is empty"),
    "only a comment": ("# nothing\n", "is empty"),
    "a list": ("[1, 2]", "must be a mapping"),
    "numbers as keys": ("{1: 2}", "must be a mapping"),
    "key twice": (GOOD + "seed: 1\nseed: 2\n", "the key 'seed' a second time in line 6"),
    "key twice inside": (GOOD.replace("quality: token_f1", "task: XSum"), "the key 'task' a second time"),
    "unknown key": (said(mehtods=["SAUQ"]), "unknown key 'mehtods'", "did you mean 'methods'?"),
    "unknown key, no near one": (said(zzz=1), "unknown key 'zzz'", "there are alignscore, batch_size"),
    "unknown task key": (task(max_tokens=3), "tasks[0] has an unknown key", "did you mean 'max_new_tokens'?"),
    "no methods": (said(methods=None), "has no 'methods'"),
    "no tasks": (said(tasks=None), "has no 'tasks'"),
    "no output": (said(output=None), "has no 'output'"),
    "empty methods": (said(methods=[]), "methods is empty"),
    "empty tasks": (said(tasks=[]), "tasks is empty"),
    "methods a text": (said(methods="SAUQ"), "methods is 'SAUQ'", "must be a list"),
    "tasks a mapping": (said(tasks={"task": "XSum"}), "tasks is", "must be a list"),
    "task a text": (said(tasks=["XSum"]), "tasks[0] is 'XSum'", "must be a mapping"),
    "unknown method": (
        said(methods=["Perplexity", "SUAQ"]),
        "methods[1]",
        "there is no method 'SUAQ'",
        "did you mean 'SAUQ'?",
    ),
    "method a number": (said(methods=[3]), "methods[0] is 3", "must be a mapping"),
    "method without name": (said(methods=[{"measure": "counting"}]), "methods[0] has no 'name'"),
    "unknown option": (
        said(methods=[{"name": "SAUQ", "mesure": "x"}]),
        "no option 'mesure'",
        "did you mean 'measure'?",
    ),
    "option of none": (said(methods=[{"name": "Perplexity", "alpha": 1}]), "no option 'alpha'", "it has none"),
    "option refused": (said(methods=[{"name": "SAUQ", "alpha": 2}]), "SAUQ refuses its options"),
    "option a mapping": (said(methods=[{"name": "SAUQ", "alpha": {"a": 1}}]), "methods[0]", "use text, numbers"),
    "method twice": (said(methods=["SAUQ", "SAUQ"]), "methods: 'SAUQ' is there twice"),
    "host": (said(host="transformer"), "host is 'transformer'", "did you mean 'transformers'?"),
    "dtype": (said(dtype="int8"), "dtype is 'int8'", "there are float32, bfloat16"),
    "engine": (said(engine="cloud"), "engine is 'cloud'", "there are local, ray"),
    "batch size text": (said(batch_size="8"), "batch_size is '8'", "must be a whole number"),
    "batch size 0": (said(batch_size=0), "batch_size is 0", "greater than or equal to 1"),
    "batch size fraction": (said(batch_size=1.5), "batch_size is 1.5", "must be a whole number"),
    "chat a text": (said(chat="perhaps"), "chat is 'perhaps'", "must be true or false"),
    "seed negative": (said(seed=-1), "seed is -1"),
    "rejection": (said(max_rejection=2), "max_rejection is 2"),
    "rejection nan": (said(max_rejection=float("nan")), "max_rejection is nan"),
    "output a number": (said(output=3), "output is 3", "must be a path"),
    "unknown built-in task": (
        said(tasks=[{"task": "TriviQA"}]),
        "no built-in task 'TriviQA'",
        "did you mean 'TriviaQA'?",
    ),
    "built-in task in lower case": (said(tasks=[{"task": "mmlu"}]), "did you mean 'MMLU'?"),
    "own task without template": (own(template=None), "also needs template"),
    "own task without data and quality": (own(data=None, quality=None), "also needs data, quality"),
    "task without name": (said(tasks=[{"limit": 3}]), "tasks[0] has no"),
    "label twice": (said(tasks=[OWN, OWN]), "tasks has 'Mine' twice"),
    "label with slash": (own(label="a/b"), "'a/b' is no label"),
    "no file": (task(data="row.jsonl"), "tasks[0].data", "there is no file", "did you mean 'rows.jsonl'?"),
    "no folder": (task(data="no/rows.jsonl"), "there is no file", "nor its folder"),
    "no shots file": (task(shots_data="shots.jsonl"), "tasks[0].shots_data", "there is no file"),
    "unknown kind of file": (task(data="rows.txt.gz/x/y"), "neither a data file"),
    "file with split": (task(split="test"), "has no subset and no split"),
    "file with shots split": (task(shots_split="train"), "which has no splits"),
    "hub without split": (task(data="owner/name"), "split is missing"),
    "unknown quality": (task(quality="rogue_l"), "no quality 'rogue_l'", "did you mean 'rouge_l'?"),
    "alignscore without weights": (
        task(quality="alignscore"),
        "'TriviaQA' measures quality by",
        "one of rouge_l, token_f1",
    ),
    "alignscore weights not there": (said(alignscore={"checkpoint": "x.ckpt"}), "alignscore.checkpoint", "no file"),
    "alignscore key": (said(alignscore={"checkpt": "x"}), "alignscore", "'checkpoint'"),
    "limit 0": (task(limit=0), "tasks[0].limit is 0"),
    "offset negative": (task(offset=-1), "tasks[0].offset is -1"),
    "fields typo": (task(fields={"qestion": "q"}), "fields names 'qestion'", "did you mean 'question'?"),
    "fields a number": (task(fields={"question": 3}), "tasks[0].fields.question is 3", "must be text"),
    "fields a list": (task(fields=["q"]), "tasks[0].fields is", "must be a mapping"),
    "template without field": (own(template="Hello"), "every prompt would be the same"),
    "template unknown field": (own(template="{qestion}"), "did you mean {question}?"),
    "template attribute": (own(template="{question.__class__}"), "a brace that begins no field"),
    "template format": (own(template="{question!r:>10}"), "a brace that begins no field"),
    "template answer first": (own(template="{answer}: {question}"), "{answer} before its end"),
    "template answer twice": (own(template="{question}{answer}{answer}"), "{answer} twice"),
    "preamble answer": (own(preamble="{answer}"), "give the answer away"),
    "stop a number": (task(stop=3), "tasks[0].stop is 3", "must be a list"),
    "stop empty text": (task(stop=[""]), "tasks[0].stop[0] is empty"),
    "shots of a conversation": (said(tasks=[{**OWN, "fields": {"questions": "q"}, "shots": 1}]), "earlier turns"),
    "shots_data without shots": (own(shots_data="rows.jsonl"), "shots is 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_one_sentence_that_names_the_file(folder, name):
    text, *expected = WRONG[name]
    path = write(folder, text)
    with pytest.raises(ValueError, match=r"run\.yaml") as caught:
        load_config(path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 600
    for part in expected:
        assert part in sentence


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"\xff\xfe\x00", "not UTF-8"), (b"a: \x00", "not a YAML file"), (b"\xef\xbb\xbf", "is empty")],
)
def test_bytes_that_are_no_text(folder, content, expected):
    path = folder / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        load_config(path)


def test_a_file_that_is_not_there_or_is_a_folder(folder):
    with pytest.raises(ValueError, match="there is no file"):
        load_config(folder / "nothing.yaml")
    with pytest.raises(ValueError, match="cannot be read"):
        load_config(folder)
    with pytest.raises(ValueError, match=r"cannot be read|there is no file"):
        load_config(folder / ("x" * 400))


def test_code_in_a_tag_does_not_run(folder):
    path = write(folder, f"methods: !!python/object/apply:pathlib.Path.touch [{folder / 'ran'}]\n" + GOOD)
    with pytest.raises(ValueError, match="tags that make objects"):
        load_config(path)
    assert not (folder / "ran").exists()


# Whatever a file says: pieces of a good one in any order and of any type, and text that is none.
KEYS = st.sampled_from([*RunConfig.model_fields, *TaskConfig.model_fields, "name", "label", "measure", "alpha"])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["SAUQ", "RAUQ", "XSum", "MMLU", "rows.jsonl", "alignscore", "{question}", "a:b", "~x/rows.csv"]),
    st.dates(),
    st.binary(max_size=3),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | SCALARS, inner, max_size=4),
    max_leaves=8,
)
FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def loads_or_says_why(path: Path) -> None:
    try:
        config = load_config(path)
    except ValueError as error:
        sentence = str(error)
    else:
        assert isinstance(config, RunConfig)
        assert config.fingerprint() == load_config(path).fingerprint()
        return
    assert "run.yaml" in sentence


@FUZZ
@given(st.dictionaries(KEYS, VALUES, max_size=6), st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_yaml_is_a_configuration_or_a_value_error(folder, changes, task_changes):
    both = {**yaml.safe_load(GOOD), **changes}
    if task_changes:
        both["tasks"] = [{**OWN, **task_changes}]
    text = yaml.dump(both)
    loads_or_says_why(write(folder, text))


@FUZZ
@given(st.text() | st.binary())
@example("&a [*a]")
@example("methods: &a [*a]\ntasks: *a\noutput: x")
@example("methods: [{name: SAUQ, alpha: &a [*a]}]\ntasks: [{task: XSum}]\noutput: x")
@example("<<: {a: 1}\n? [a]\n: b")
@example("a: &a {b: 1}\nc: {<<: [*a, 1]}")
@example("a: !!binary '*'")
@example("a: !!set {b, c}")
@example("a: !!pairs [b, c]")
@example("a: " + "9" * 5000)
@example('output: "a\\0b"\nmethods: [SAUQ]\ntasks: [{task: M, data: "\\0.jsonl", template: "{id}", quality: "a:b"}]')
@example('output: "\\uD800"\nmethods: [SAUQ]\ntasks: [{task: XSum, data: "\\uD800.csv", quality: rouge_l}]')
@example(f"output: o\nmethods: [SAUQ]\ntasks: [{{task: XSum, data: {'x' * 5000}.csv, quality: rouge_l}}]")
def test_any_text_is_a_configuration_or_a_value_error(folder, text):
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    loads_or_says_why(path)


def test_a_bomb_of_aliases_is_refused_at_once(folder):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    with pytest.raises(ValueError, match=r"run\.yaml"):
        load_config(write(folder, "\n".join([*lines, "methods: *a29", "output: *a29", "tasks: *a29"])))


# --- what is filled in -------------------------------------------------------------------------------------


def test_a_task_is_filled_in_from_the_built_in_one():
    filled = TaskConfig(task="TriviaQA")
    assert (filled.data, filled.subset, filled.split) == ("mandarjoshi/trivia_qa", "rc.nocontext", "validation")
    assert (filled.shots, filled.shots_split, filled.max_new_tokens, filled.stop) == (5, "train", 20, ("\n",))
    assert (filled.label, filled.quality, filled.limit) == ("TriviaQA", "alignscore", 2000)


def test_published_settings():
    published = {
        name: (filled.shots, filled.max_new_tokens, filled.stop, filled.quality)
        for name, built_in in BUILT_IN.items()
        if built_in.note == "published" and (filled := TaskConfig(task=name))
    }
    assert published == {
        "TriviaQA": (5, 20, ("\n",), "alignscore"),
        "TruthfulQA": (0, 128, ("\n",), "alignscore"),
        "MMLU": (5, 3, ("\n",), "exact_match"),
        "CoQA": (0, 20, ("\n",), "alignscore"),
        "SAMSum": (0, 128, ("\n",), "alignscore_source"),
        "XSum": (0, 56, ("\n",), "alignscore_source"),
    }
    assert BUILT_IN["TruthfulQA"].settings["preamble"].count("Q: ") == 6


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_task_is_complete(name):
    filled = TaskConfig(task=name)
    assert filled.split
    assert filled.limit == 2000
    assert set(BUILT_IN[name].columns) <= set(ROW_NAMES)


def test_data_of_ones_own_leaves_nothing_of_the_built_in_source():
    filled = TaskConfig(task="MMLU", data="rows.csv", limit=None)
    assert (filled.subset, filled.split, filled.shots_split, filled.shuffle_seed, filled.limit) == (None,) * 5
    assert filled.shots == 5


def test_null_means_the_built_in_value_where_nothing_is_no_value():
    assert TaskConfig(task="XSum", template=None, data=None).data == "EdinburghNLP/xsum"
    assert TaskConfig(task="XSum", subset=None, limit=None).limit is None


def test_paths_begin_at_the_file_and_data_at_the_data_folder(folder):
    (folder / "rows").mkdir()
    shutil.copy(folder / "rows.jsonl", folder / "rows" / "more.csv")
    both = said(data_folder="rows", tasks=[{"task": "XSum", "data": "more.csv", "quality": "rouge_l"}])
    config = load_config(write(folder, both))
    assert config.tasks[0].data == str(folder / "rows" / "more.csv")
    assert config.output == folder / "out"
    again = load_config(write(folder, GOOD), data_folder=folder)
    assert again.tasks[0].data == str(folder / "rows.jsonl")


def test_the_folder_one_is_in_does_not_matter(folder, monkeypatch):
    path = write(folder, GOOD)
    monkeypatch.chdir(folder.parent)
    assert load_config(os.path.relpath(path)) == load_config(path)


def test_a_model_beside_the_file_is_that_model(folder):
    (folder / "model").mkdir()
    assert load_config(write(folder, said(model="model"))).model == str(folder / "model")
    assert load_config(write(folder, said(model="owner/name"))).model == "owner/name"


def test_methods_have_their_options_and_labels():
    config = RunConfig(
        methods=["SAUQ", {"name": "SAUQ-generation", "alpha": 0.4, "label": "mine"}], tasks=[OWN], output="out"
    )
    plain, mine = (method.build() for method in config.methods)
    assert (plain.name, mine.name, mine.alpha, mine.scope) == ("SAUQ", "mine", 0.4, "generation")
    assert build_method("RAUQ-paper", {"alpha": 0.1}).indexing == "paper"


def test_options_of_a_method_that_samples_load_no_model():
    assert build_method("SemanticEntropy", {"n_samples": 3, "nli": "no/such-model"}).n_samples == 3


def test_bom_and_crlf(folder):
    path = folder / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_config(path) == load_config(write(folder, GOOD))


def test_a_configuration_comes_back_from_its_own_record(folder):
    config = load_config(write(folder, said(methods=["RAUQ", {"name": "SAUQ", "measure": "counting"}])))
    again = RunConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert again.fingerprint() == config.fingerprint()


# --- the fingerprint ---------------------------------------------------------------------------------------

SAME = {"output": "elsewhere", "engine": "ray", "workers": 3, "batch_size": 2, "max_rejection": 0.9, "device": "cpu"}
OTHER = {"seed": 1, "chat": True, "dtype": "float32", "host": "transformer_lens", "methods": ["RAUQ"], "model": "a/b"}


def test_the_fingerprint_is_of_what_changes_rows(folder):
    first = load_config(write(folder, GOOD)).fingerprint()
    for key, value in SAME.items():
        assert load_config(write(folder, said(**{key: value}))).fingerprint() == first, key
    others = {load_config(write(folder, said(**{key: value}))).fingerprint() for key, value in OTHER.items()}
    for key, value in {"limit": 3, "shots": 0, "template": "{question}!", "stop": [], "max_new_tokens": 7}.items():
        others.add(load_config(write(folder, task(**{key: value}))).fingerprint())
    assert first not in others
    assert len(others) == len(OTHER) + 5


def test_the_fingerprint_is_of_the_rows_wherever_they_lie(folder):
    first = load_config(write(folder, GOOD)).fingerprint()
    (folder / "other").mkdir()
    (folder / "other" / "rows.jsonl").write_text(ROW)
    moved = load_config(write(folder / "other", GOOD))
    assert moved.fingerprint() == first
    (folder / "rows.jsonl").write_text(ROW.replace("Ada", "Bob"))
    assert load_config(write(folder, GOOD)).fingerprint() != first
    (folder / "rows.jsonl").unlink()
    assert moved.fingerprint() == first
    (folder / "other" / "rows.jsonl").unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        moved.fingerprint()


def test_nearest_does_not_mind_case_and_marks():
    assert nearest("trivia-qa", BUILT_IN) == "TriviaQA"
    assert nearest("zzz", BUILT_IN) is None


def in_a_new_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_nothing_optional_is_imported_before_it_is_used():
    names = "{'pydantic', 'yaml', 'datasets', 'pyarrow', 'rouge_score', 'torch'}"
    done = in_a_new_python(f"import sys, attnprobe.bench; print({names} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("package", ["pydantic", "yaml"])
def test_a_missing_package_is_one_sentence(folder, package, monkeypatch):
    path = write(folder, GOOD)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(bench, "config", bench.config)  # put back afterwards, as the one that others have imported
    monkeypatch.delitem(sys.modules, "attnprobe.bench.config")
    with pytest.raises(ImportError) as caught:
        importlib.import_module("attnprobe.bench.config").load_config(path)
    assert str(caught.value) == f'the benchmark needs the package {package!r}: pip install "attnprobe[bench]"'


def test_the_weights_of_alignscore_are_part_of_the_fingerprint(folder):
    weights, prints = folder / "weights.ckpt", set()
    for content in (b"x", b"xy"):
        weights.write_bytes(content)
        for checkpoint in ("weights.ckpt", str(weights)):
            config = load_config(write(folder, said(alignscore={"checkpoint": checkpoint})))
            prints.add(config.fingerprint())
    assert len(prints) == 2
    weights.unlink()
    assert config.fingerprint() not in prints


DOCS = (Path(__file__).parents[2] / "docs" / "benchmark.md").read_text()


def test_the_page_shows_configurations_that_load(folder):
    for name in ("AlignScore-large.ckpt", "capitals.csv"):
        (folder / name).write_text("")
    blocks = [block.split("```")[0] for block in DOCS.split("```yaml\n")[1:]]
    assert len(blocks) == 3
    for block in blocks:
        assert load_config(write(folder, said(**yaml.safe_load(block))))


def test_the_page_names_everything():
    for name in (*TaskConfig.model_fields, *RunConfig.model_fields, *QUALITIES, *BUILT_IN):
        assert re.search(rf"\b{name}\b", DOCS), name
    rows = {line.split("|")[1].strip(" `"): line.split("|") for line in DOCS.splitlines() if line.startswith("| `")}
    for name in BUILT_IN:
        task = TaskConfig(task=name)
        assert [cell.strip(" `") for cell in rows[name][3:5]] == [str(task.max_new_tokens), task.quality]
        assert rows[name][5].strip() == ", ".join(filter(None, (task.data, task.subset, task.split)))


@pytest.mark.parametrize("name", ["local", "published"])
def test_example_configurations(name, tmp_path):
    folder = tmp_path / "configs"
    shutil.copytree(Path(__file__).parents[2] / "benchmarks" / "configs", folder)
    (folder / "data").mkdir()
    for file in ("triviaqa", "triviaqa_gold", "truthfulqa", "mmlu", "squad", "samsum", "dialogsum", "xsum"):
        (folder / "data" / f"{file}.jsonl").write_text(ROW)
    (folder / "AlignScore-large.ckpt").write_bytes(b"")
    assert load_config(folder / f"{name}.yaml").tasks
