"""`head_atlas` on a tiny model: its numbers, what it keeps, and what it says of texts that will not do."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import torch
from tiny import VOCAB, tiny_model
from typer.testing import CliRunner

import attnprobe as ap
from attnprobe.atlas import reading
from attnprobe.atlas.report import sections, summary, write
from attnprobe.atlas.texts import Text, read_texts
from attnprobe.cli.main import app

WORDS = ("cat", "sat", "on", "a", "mat", "and", "looked", "at", "every", "bird", "by", "the", "old", "house", "near")


class WordTokenizer:
    """A token a word, `<s>` before a text."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1] + [3 + zlib.crc32(word.encode()) % (VOCAB - 3) for word in text.split()]}


def reader(attention: str = "sdpa", name: str = "llama"):
    model = tiny_model(name, attention=attention)
    model.tokenizer = WordTokenizer()
    return model


def words(n: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + i * 7) % len(WORDS)] for i in range(n))


TEXTS = [words(40), words(33, 3), words(60, 5), words(9)]
QUIET = dict(progress=False, min_tokens=16, max_tokens=50)


@pytest.fixture(scope="module")
def atlas():
    return ap.head_atlas(reader(), TEXTS, **QUIET)


def dense(model, ids: list[int], layer: int, head: int) -> dict[str, float]:
    """A few diagnostics of one head, from eager attention in float64."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_attentions=True)
    a = out.attentions[layer][0, head].double().numpy()
    n = len(a)
    g, c = a.T @ a, a.sum(0)
    s = g / np.sqrt(np.outer(c, c))
    entropies = [-sum(x * np.log(x) for x in row if x > 0) for row in a]
    rest = [row[1:] / row[1:].sum() for row in a[1:]]
    return {
        "sink_score": a[:, 0].mean(),
        "row_entropy": np.mean(entropies),
        "row_entropy_without_sink": np.mean([-sum(x * np.log(x) for x in row if x > 0) for row in rest]),
        "self_attention": np.diag(a).mean(),
        "previous_token_attention": np.mean([a[i, i - 1] for i in range(1, n)]),
        "mean_look_back": np.mean([sum(a[i, j] * (i - j) for j in range(n)) for i in range(n)]),
        "participation_ratio": np.trace(s) ** 2 / (n * (s**2).sum()),
        "participation_ratio_counting": np.trace(g) ** 2 / (n * (g**2).sum()),
        "lambda2": np.sort(np.linalg.eigvalsh(s))[-2],
        "log_determinant": np.log(np.diag(a)).sum(),
    }


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (0, 3), (1, 1), (2, 2), (2, 3)])
def test_five_heads_are_those_of_a_dense_computation(atlas, layer, head):
    model = reader("eager").double()
    expected = [dense(model, WordTokenizer()(text)["input_ids"][:50], layer, head) for text in TEXTS[:3]]
    row = atlas.table.loc[(layer, head)]
    for name in expected[0]:
        values = np.array([one[name] for one in expected])
        assert row[name] == pytest.approx(values.mean(), rel=2e-5, abs=2e-6), name
        assert row[f"{name}_se"] == pytest.approx(values.std(ddof=1) / np.sqrt(3), rel=2e-3, abs=1e-6), name


def test_an_atlas_says_what_was_read(atlas):
    assert atlas.readings.texts.to_dict("list") == {"name": ["text 0", "text 1", "text 2"], "tokens": [41, 34, 50]}
    assert atlas.readings.failed == {"text 3": "it has 10 tokens, fewer than 16"}
    assert atlas.readings.cut == 1
    assert atlas.table.index.names == ["layer", "head"]
    assert len(atlas.table) == 12
    assert atlas.table["role"].isin(ap.atlas.roles.ROLES).all()
    rho = atlas.correlations("sink_score").loc["participation_ratio_counting", "spearman"]
    assert -1 <= rho < 0
    text = " ".join(note for section in sections(atlas) for note in section.notes)
    assert "3 texts of 34 to 50 tokens, 12 heads" in text
    assert "1 texts were longer" in text
    assert "text 3 was left out: it has 10 tokens" in text


def test_what_is_written_can_be_read_again(atlas, tmp_path):
    names = {path.name for path in write(atlas, tmp_path / "out")}
    assert names == {"heads.csv", "summary.json", "correlations_with_sink_score.csv", "correlations_with_entropy.csv"}
    said = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert said == json.loads(json.dumps(summary(atlas)))
    assert said["roles"] == {name: int((atlas.table["role"] == name).sum()) for name in said["roles"]}
    assert said["texts"] == 3


def test_a_folder_is_gone_on_with(atlas, tmp_path, monkeypatch):
    read = []
    original = reading._row

    def until_killed(host, text, *rest):
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(text.name)
        return original(host, text, *rest)

    monkeypatch.setattr(reading, "_row", until_killed)
    with pytest.raises(KeyboardInterrupt):
        ap.head_atlas(reader(), TEXTS, folder=tmp_path, **QUIET)
    monkeypatch.setattr(
        reading, "_row", lambda host, text, *rest: read.append(text.name) or original(host, text, *rest)
    )
    resumed = ap.head_atlas(reader(), TEXTS, folder=tmp_path, **QUIET)
    assert read == ["text 0", "text 1", "text 2", "text 3"]
    assert resumed.table.equals(atlas.table)
    with pytest.raises(ValueError, match="other settings"):
        ap.head_atlas(reader(), TEXTS[:2], folder=tmp_path, **QUIET)


def test_analyzers_of_ones_own():
    found = ap.head_atlas(reader(), TEXTS[:2], analyzers=[ap.SelfAttention(), ap.TDO("zipf", lambda2=False)], **QUIET)
    assert set(found.table) == {"self_attention", "self_attention_se"} | {
        f"participation_ratio_zipf{end}" for end in ("", "_se")
    }
    assert found.roles is None
    assert list(found.against()) == []


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ([], {}, "there are no texts"),
        ([words(3)], {}, "none of 1 texts could be read; the first, 'text 0': it has 4 tokens, fewer than 16"),
        ([words(30)], {"min_tokens": 90}, "min_tokens=90, max_tokens=50"),
    ],
)
def test_texts_that_will_not_do(texts, settings, message):
    with pytest.raises(ValueError, match=message):
        ap.head_atlas(reader(), texts, **{**QUIET, **settings})


def test_what_is_no_list_of_texts():
    with pytest.raises(TypeError, match="texts is one string"):
        ap.head_atlas(reader(), "a text", **QUIET)
    with pytest.raises(TypeError, match="text 1 is a int"):
        ap.head_atlas(reader(), ["a", 3], **QUIET)


def test_sources_of_texts(tmp_path):
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "a.md").write_text("ay")
    (tmp_path / "c.bin").write_text("see")
    assert read_texts(tmp_path) == [Text("a.md", "ay"), Text("b.txt", "bee")]
    assert read_texts(tmp_path / "b.txt") == [Text("b.txt", "bee")]
    table = tmp_path / "t.jsonl"
    table.write_text('{"text": "one", "n": 1}\n{"text": "two", "n": 2}\n')
    assert read_texts(table) == [Text("row 0", "one"), Text("row 1", "two")]
    with pytest.raises(ValueError, match=r"row 0 of .* has no text in 'n' \(it has text, n\)"):
        read_texts(table, "n")
    with pytest.raises(ValueError, match="is no source of texts"):
        read_texts(tmp_path / "c.bin")
    with pytest.raises(ValueError, match="cannot be read"):
        read_texts(tmp_path / "missing.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no text files"):
        read_texts(tmp_path / "empty")


def test_the_command(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ap, "load_model", lambda name, **settings: asked.append((name, settings)) or reader())
    table = tmp_path / "texts.jsonl"
    table.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    call = ["heads", "embedded", str(table), "--field", "body", "--min-tokens", "16", "--out", str(tmp_path / "o")]
    shown = CliRunner().invoke(app, [*call, "--resamples", "50", "--limit", "2"])
    assert shown.exit_code == 0, shown.output
    assert "participation_ratio_counting" in shown.output
    assert "sink-biased" in shown.output
    assert asked[0][0] is None
    assert asked[0][1]["host"] == "transformers"
    as_json = CliRunner().invoke(app, [*call, "--resamples", "50", "--limit", "2", "--json"])
    said = json.loads(as_json.stdout)
    assert said["texts"] == 2
    assert -1 <= said["correlations"]["sink_score"]["row_entropy"]["spearman"] <= 1
    missing = CliRunner().invoke(app, ["heads", "embedded", str(table), "--out", str(tmp_path / "p")])
    assert missing.exit_code == 2
    assert "has no text in 'text'" in missing.stderr
    assert len(asked) == 2  # told before a model was loaded
