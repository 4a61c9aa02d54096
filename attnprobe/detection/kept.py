"""Features on disk: a folder that grows batch by batch, and that a later call goes on with.

features.json      settings and model; a folder holds features of one kind
part-000001.npz    the features of one batch of texts, with checksums
.lock              held while somebody writes; the system lets go of it when the process dies
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from jaxtyping import Float

from attnprobe.bench.store import differences
from attnprobe.detection.array_file import DamagedFile, read_arrays, write_arrays

_SAID = "features.json"
_PART = re.compile(r"part-(\d{6,})\.npz")


class Kept:
    """The features of a folder, held for writing; made by `keep_in`.

    Attributes:
        rows: key of a text -> its features.
    """

    def __init__(self, folder: Path | None, n_features: int) -> None:
        self.rows: dict[str, Float[np.ndarray, "feature"]] = {}
        self._folder = folder
        self._n_features = n_features
        self._last = 0
        if folder is not None:
            for path in folder.glob(".*.partial"):  # left by a call that was killed
                path.unlink(missing_ok=True)
            for number, path in _parts(folder):
                self._last = number
                self._take(path)

    def append(self, keys: Sequence[str], values: Float[np.ndarray, "text feature"]) -> None:
        """Keep the features of some texts, on disk first.

        Raises:
            OSError: the part could not be written; the parts before it are whole.
        """
        if self._folder is not None:
            arrays = {"keys": np.array(keys), "values": values}
            write_arrays(self._folder / f"part-{self._last + 1:06d}.npz", arrays, {})
            self._last += 1
        self.rows.update(zip(keys, values, strict=True))

    def _take(self, path: Path) -> None:
        try:
            arrays, _ = read_arrays(path)
            keys, values = arrays["keys"], arrays["values"]
            if keys.shape != (len(values),) or values.shape[1:] != (self._n_features,):
                raise DamagedFile(f"{path.name} has arrays of other shapes.")
        except (DamagedFile, KeyError):
            aside = path.with_name(f"_damaged-{path.name}")
            os.replace(path, aside)
            warnings.warn(
                f"{path.name} is damaged: it is kept as {aside.name}, and its texts are read again.", stacklevel=6
            )
            return
        self.rows.update(zip(keys.tolist(), values, strict=True))


@contextlib.contextmanager
def keep_in(folder: str | os.PathLike[str] | None, said: Mapping[str, Any], n_features: int) -> Iterator[Kept]:
    """Hold a folder for writing features; a new one is made, one that says the same is gone on with.

    Args:
        folder: None keeps features in memory alone.
        said: settings and model, as JSON knows them.

    Raises:
        ValueError: the folder holds features of other settings or of another model.
        RuntimeError: another call holds it.
        OSError: it cannot be made or read.
    """
    if folder is None:
        yield Kept(None, n_features)
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise RuntimeError(f"another call is writing to {folder}: wait for it, or name another folder.") from None
    try:
        _settle(folder, json.loads(json.dumps(said)))
        yield Kept(folder, n_features)
    finally:
        lock.release()


def _settle(folder: Path, said: dict[str, Any]) -> None:
    """Make features.json agree with what is about to be written, or refuse."""
    path = folder / _SAID
    if not path.exists():
        if _parts(folder):
            raise ValueError(f"{str(folder)!r} holds features and no {_SAID} that says whose: name another folder.")
        partial = folder / f".{_SAID}.partial"
        partial.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
        return
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{_SAID} in {str(folder)!r} is damaged: name another folder.") from None
    differing = differences(old, said)
    if differing:
        raise ValueError(f"{str(folder)!r} holds other features ({'; '.join(differing)}): name another folder.")


def _parts(folder: Path) -> list[tuple[int, Path]]:
    """The parts of a folder in the order written."""
    return sorted((int(match[1]), path) for path in folder.iterdir() if (match := _PART.fullmatch(path.name)))
