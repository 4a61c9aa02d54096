"""Loading language models: the embedded default, local directories, hub names, models already in memory."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnprobe.embedded import EMBEDDED_MODEL, SMOLLM2, ensure_embedded, quiet_transformers

if TYPE_CHECKING:
    import torch

Host = Literal["transformer_lens", "transformers"]
HOSTS: tuple[str, ...] = ("transformer_lens", "transformers")


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def load_model(
    name: Any = None,
    *,
    host: Host = "transformer_lens",
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a language model; as a TransformerBridge (the default host) it is ready for `Probe` and `score`.

    Args:
        name: None or "SmolLM2-135M-Instruct" for the embedded default; a local directory; a hub name; a
            transformers model already in memory; or a TransformerBridge or HookedTransformer, which is
            returned as it is.
        host: "transformer_lens" for a TransformerBridge, "transformers" for the plain model (on sdpa).
        tokenizer: used instead of the model's own. A model already in memory may go without one: token ids
            in, token ids out.
        device: for example "cpu" or "cuda:1". None takes a CUDA device where there is one; a model already in
            memory stays where it is.
        dtype: a torch dtype or its name. None keeps the dtype of the checkpoint.
        device_map: handed to transformers, which needs the accelerate package for it; excludes `device`.
        trust_remote_code: run Python code that comes with the checkpoint. Only for a source you trust.

    Returns:
        A TransformerBridge, or a transformers model, with the tokenizer as `model.tokenizer`. It adds the special
        tokens that the model's maker meant it to, on both hosts; `model.to_tokens` of a TransformerBridge adds BOS.

    Raises:
        ValueError: for an unknown host or dtype, or arguments that exclude each other.
        TypeError: if `name` is none of the above.
        FileNotFoundError: if a path does not exist, or is not the folder of a model.
        ConnectionError: if the embedded model has to be fetched and pip cannot.
        OSError: if a hub name is neither stored here nor reachable.
        RuntimeError: if what was fetched is not what was expected, or the device is not available.
        ImportError: if `device_map` is given without accelerate.

    Example:
        >>> import attnprobe as ap
        >>> model = ap.load_model()  # doctest: +SKIP
        >>> plain = ap.load_model("./my-model", host="transformers", dtype="bfloat16")  # doctest: +SKIP
    """
    if host not in HOSTS:
        raise ValueError(f"unknown host {host!r}; the hosts are {' and '.join(map(repr, HOSTS))}")
    _check_placement(device, device_map)
    request = _Request(host, tokenizer, device, _torch_dtype(dtype), device_map, trust_remote_code)
    if name is None or name == EMBEDDED_MODEL:
        with quiet_transformers():
            return _from_name(ensure_embedded(SMOLLM2), request)
    if isinstance(name, str | os.PathLike):
        return _from_name(_local_folder(name, has_tokenizer=tokenizer is not None) or str(name), request)
    if _is_hooked(name):
        return _hooked_as_it_is(name, request)
    return _from_memory(name, request)


# --- loading ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    """What the caller of `load_model` asked for, checked."""

    host: str
    tokenizer: Any
    device: str | torch.device | None
    dtype: torch.dtype | None
    device_map: Any
    trust_remote_code: bool

    def target(self) -> str | torch.device | None:
        """The device to load on; None where device_map decides."""
        if self.device is not None or self.device_map is not None:
            return self.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"


def _from_name(source: Path | str, request: _Request) -> Any:
    with _plain_failures(source):
        load = _bridge_from_name if request.host == "transformer_lens" else _plain_from_name
        return load(str(source), request)


def _bridge_from_name(source: str, request: _Request) -> Any:
    # The bridge loads by itself here, rather than being handed a model: it then picks the model class of the
    # architecture (an encoder-decoder is not a causal model) and prepares the loading where it has to.
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    dtype = request.dtype or _checkpoint_dtype(source, request.trust_remote_code)
    with _on_disk(request.tokenizer) as tokenizer:
        bridge = TransformerBridge.boot_transformers(
            source,
            tokenizer=tokenizer,
            device=request.target(),
            dtype=dtype,
            device_map=request.device_map,
            trust_remote_code=request.trust_remote_code,
        )
    own = request.tokenizer
    if own is None:
        own = AutoTokenizer.from_pretrained(source, trust_remote_code=request.trust_remote_code)
    return _with_tokenizer(bridge, own)


def _plain_from_name(source: str, request: _Request) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trust = request.trust_remote_code
    tokenizer = request.tokenizer
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=request.dtype or "auto",
        device_map=request.device_map,
        trust_remote_code=trust,
        attn_implementation="sdpa",
    )
    target = request.target()
    if target is not None:
        model = model.to(target)
    model.tokenizer = tokenizer
    return model


def _from_memory(given: Any, request: _Request) -> Any:
    from transformers import PreTrainedModel

    if not isinstance(given, PreTrainedModel):
        raise TypeError(
            f"cannot load a model from {type(given).__name__}: give a name, a folder, a transformers model, "
            "a TransformerBridge or a HookedTransformer"
        )
    if request.device_map is not None:
        raise ValueError("device_map places a model while it is read; this one is already in memory")
    model: Any = given
    if request.device is not None or request.dtype is not None:
        model = model.to(device=request.device, dtype=request.dtype)
    if request.host == "transformers":
        if request.tokenizer is not None:
            model.tokenizer = request.tokenizer
        return model
    return _bridge_around(model, request.tokenizer)


def _bridge_around(model: Any, tokenizer: Any) -> Any:
    """A bridge around a model in memory; the bridge replaces the attention of that model in place."""
    # The bridge finds its adapter by this name, and a model made from a bare config has none.
    if not getattr(model.config, "architectures", None):
        model.config.architectures = [type(model).__name__]
    label = model.config.name_or_path or type(model).__name__
    # Said outright: without a look at the model, the bridge records float32, and CUDA where there is one.
    where: dict[str, Any] = {"device": model.device, "dtype": model.dtype}
    if tokenizer is None:
        # boot_transformers would look for a tokenizer by name on the hub; this builder goes without one.
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        # Patterns need eager attention; boot_transformers switches by itself, the builder may not.
        model.set_attn_implementation("eager")
        config = copy.deepcopy(model.config)
        return build_bridge_from_module(model, config.architectures[0], hf_config=config, model_name=label, **where)
    from transformer_lens.model_bridge import TransformerBridge

    with _on_disk(tokenizer) as stored:
        bridge = TransformerBridge.boot_transformers(label, hf_model=model, tokenizer=stored, **where)
    return _with_tokenizer(bridge, tokenizer)


def _with_tokenizer(bridge: Any, tokenizer: Any) -> Any:
    """Give a bridge the tokenizer as its maker meant it.

    The bridge re-creates a tokenizer so that it always puts a BOS token first. The same text would then be other
    tokens, and have another uncertainty, than on the plain model. `bridge.to_tokens` keeps to the convention of
    TransformerLens: it adds the token itself where it is told that the tokenizer does not.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if hasattr(bridge, "_tokenizer"):
        bridge._tokenizer = tokenizer  # the property would re-create it once more
    else:
        bridge.tokenizer = tokenizer
    ids = tokenizer("a")["input_ids"]
    special = {tokenizer.bos_token_id, getattr(tokenizer, "cls_token_id", None)} - {None}
    bridge.cfg.tokenizer_prepends_bos = len(ids) > 1 and ids[0] in special
    bridge.cfg.tokenizer_appends_eos = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id
    return bridge


def _is_hooked(model: Any) -> bool:
    # Told by what it offers, not by its class: HookedTransformer is gone from transformer-lens 4.
    return hasattr(model, "hook_dict") and hasattr(model, "cfg")


def _hooked_as_it_is(model: Any, request: _Request) -> Any:
    given = ("tokenizer", "device", "dtype", "device_map")
    extra = [option for option in given if getattr(request, option) is not None]
    if request.host != "transformer_lens":
        raise ValueError(f'a {type(model).__name__} is a transformer_lens model; it cannot become host="transformers"')
    if extra:
        raise ValueError(
            f"a {type(model).__name__} is returned as it is, so {' and '.join(extra)} cannot be given with it"
        )
    return model


@contextlib.contextmanager
def _on_disk(tokenizer: Any) -> Iterator[Any]:
    """The tokenizer as one that was read from a folder, which is the only kind the bridge can re-create."""
    origin = getattr(tokenizer, "init_kwargs", {}).get("name_or_path")
    if tokenizer is None or (origin and (Path(origin).is_dir() or not _looks_like_path(origin))):
        yield tokenizer
        return
    from transformers import AutoTokenizer

    # The bridge re-creates the tokenizer while it boots and does not need the folder afterwards.
    with tempfile.TemporaryDirectory(prefix="attnprobe-tokenizer-", ignore_cleanup_errors=True) as folder:
        tokenizer.save_pretrained(folder)
        yield AutoTokenizer.from_pretrained(folder)


def _checkpoint_dtype(source: str, trust_remote_code: bool) -> torch.dtype:
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return _torch_dtype(found) or torch.float32


@contextlib.contextmanager
def _plain_failures(source: Path | str) -> Iterator[None]:
    """Turn what the libraries say about a model that cannot be read into one sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"the weights of {str(source)!r} cannot be read ({_first_line(error)})") from error
    except OSError as error:
        if isinstance(source, Path):
            raise OSError(f"the model in {str(source)!r} cannot be read ({_first_line(error)})") from error
        raise OSError(
            f"the model {str(source)!r} was not found on this machine and could not be fetched from the "
            f"model hub ({_first_line(error)})"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


# --- checking arguments -----------------------------------------------------------------------------------


def _check_placement(device: Any, device_map: Any) -> None:
    if device_map is not None:
        if device is not None:
            raise ValueError("give device or device_map, not both")
        if importlib.util.find_spec("accelerate") is None:
            raise ImportError("device_map needs the accelerate package: pip install accelerate")
    if device is None:
        return
    import torch

    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {str(device)!r}; for example cpu, cuda, cuda:1 or mps") from error
    missing = (kind == "cuda" and not torch.cuda.is_available()) or (
        kind == "mps" and not torch.backends.mps.is_available()
    )
    if missing:
        raise RuntimeError(f"the device {str(device)!r} is not available to this PyTorch")


def _torch_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None:
        return None
    import torch

    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"unknown dtype {str(dtype)!r}; for example float32, bfloat16 or float16")
    return found


def _local_folder(name: str | os.PathLike[str], *, has_tokenizer: bool) -> Path | None:
    """The folder that `name` means, or None if it is a hub name."""
    text = os.fspath(name)
    if not text.strip():
        raise ValueError("the name of the model is empty")
    path = Path(text).expanduser()
    if path.is_dir():
        _check_folder(path, has_tokenizer)
        return path
    if path.exists():
        raise FileNotFoundError(f"{text!r} is a file; give the folder that holds config.json and the weights")
    if not isinstance(name, str) or _looks_like_path(text):
        raise FileNotFoundError(f"there is no folder {text!r}")
    return None


def _looks_like_path(text: str) -> bool:
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    if text.startswith((".", "~", *separators)) or Path(text).is_absolute():
        return True
    depth = sum(text.count(separator) for separator in separators)
    # A hub name is "model" or "owner/model": anything deeper, or under a folder that exists, is a path.
    return depth > 1 or (depth == 1 and Path(text).parent.is_dir())


def _check_folder(path: Path, has_tokenizer: bool) -> None:
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{str(path)!r} is not the folder of a model: it has no config.json")
    if not has_tokenizer and not any((path / file).is_file() for file in _TOKENIZER_FILES):
        raise FileNotFoundError(f"{str(path)!r} has no tokenizer; save one there or pass tokenizer=")
