"""Named arrays in one file: there in full or not at all, with checksums, and never a pickle."""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_SAID = "said"


class DamagedFile(ValueError):
    """A file that is not what was written."""


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], said: Mapping[str, Any]) -> None:
    """Write arrays, and what is said about them as JSON, to an .npz file.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    # hidden, and in the same folder, so that renaming it is one step
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            np.savez(file, allow_pickle=False, **{_SAID: np.array(json.dumps(said)), **arrays})
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a file and what it says about them.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFile: it is not whole, a checksum is wrong, or it holds something else.
    """
    data = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            wrong = archive.testzip()
        if wrong is not None:
            raise DamagedFile(f"{path.name} is damaged: the checksum of {wrong} is wrong.")
        with np.load(io.BytesIO(data), allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files}
        said = json.loads(str(arrays.pop(_SAID)[()]))
    except DamagedFile:
        raise
    except Exception as error:  # a broken archive raises whatever its bytes lead to
        raise DamagedFile(f"{path.name} is damaged, or is no file of arrays: {type(error).__name__}.") from error
    if not isinstance(said, dict):
        raise DamagedFile(f"{path.name} is damaged: it says nothing about its arrays.")
    return arrays, said
