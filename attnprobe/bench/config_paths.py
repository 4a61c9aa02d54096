"""Paths in a configuration: where relative ones begin, and that the files it reads are there."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnprobe.bench.data import is_file_name
from attnprobe.bench.quality import WITHOUT_A_MODEL

if TYPE_CHECKING:
    from attnprobe.bench.config import RunConfig, TaskConfig


def anchored(config: RunConfig, folder: Path, data_folder: str | os.PathLike[str] | None) -> RunConfig:
    """The configuration with its paths made absolute, and the files that it reads found.

    Raises:
        ValueError: a file that is not there.
    """
    said = folder / os.path.expanduser(config.data_folder or "")
    rows = Path(os.path.abspath(data_folder if data_folder is not None else said))
    update: dict[str, Any] = {
        "tasks": tuple(_anchored_task(task, i, rows) for i, task in enumerate(config.tasks)),
        "output": _under(folder, config.output),
        "data_folder": rows,
        "model": _folder_or_name(folder, config.model),
    }
    if config.alignscore is not None:
        checkpoint = _under(folder, config.alignscore.checkpoint)
        if not _is_file(checkpoint):
            raise ValueError(
                f"alignscore.checkpoint: there is no file {str(checkpoint)!r}; fetch AlignScore-large.ckpt from the "
                "hub repository yzha/AlignScore, or choose another quality for the tasks, one of "
                f"{', '.join(WITHOUT_A_MODEL)}"
            )
        model = _folder_or_name(folder, config.alignscore.model)
        update["alignscore"] = config.alignscore.model_copy(update={"checkpoint": checkpoint, "model": model})
    return config.model_copy(update=update)


def _anchored_task(task: TaskConfig, number: int, folder: Path) -> TaskConfig:
    update = {}
    for key in ("data", "shots_data"):
        name = getattr(task, key)
        if name is not None and is_file_name(name):
            path = _under(folder, name)
            if not _is_file(path):
                raise ValueError(f"tasks[{number}].{key}: there is no file {str(path)!r}{_neighbour(path)}")
            update[key] = str(path)
    return task.model_copy(update=update)


def _neighbour(path: Path) -> str:
    try:
        names = [file.name for file in path.parent.iterdir() if is_file_name(file.name)]
    except (OSError, ValueError):
        return ", nor its folder"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _under(folder: Path, path: str | Path) -> Path:
    return Path(os.path.abspath(folder / os.path.expanduser(path)))


def _is_file(path: Path) -> bool:
    # A name that no file system takes (too long, a zero byte) is a file that is not there.
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _folder_or_name(folder: Path, name: str | None) -> str | None:
    """A model's folder, if there is one beside the configuration, or else its name as it is."""
    if name is None:
        return None
    path = _under(folder, name)
    try:
        return str(path) if path.is_dir() else name
    except (OSError, ValueError):
        return name
