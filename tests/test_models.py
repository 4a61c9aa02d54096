"""Loading models: names, folders, models in memory, and what can go wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from attnprobe import models
from attnprobe.models import load_model

VOCABULARY = {"<s>": 0, "</s>": 1, "<unk>": 2, "the": 3, "cat": 4, "sat": 5, "on": 6, "mat": 7}


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
