"""Rows of a data set: a file on this machine, or a data set on the hub."""

from __future__ import annotations

import re
from pathlib import PurePath

FILE_KINDS = (".jsonl", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")


def is_file_name(name: str) -> bool:
    """Whether `name` means a file here rather than a data set on the hub.

    >>> is_file_name("rows/triviaqa.jsonl"), is_file_name("mandarjoshi/trivia_qa")
    (True, False)
    """
    return PurePath(name).suffix.lower() in FILE_KINDS


def check_source(name: str, subset: str | None, split: str | None, prefix: str = "") -> None:
    """Whether these can name rows at all.

    Raises:
        ValueError: they cannot.

    >>> check_source("cais/mmlu", "all", "test")
    """
    if is_file_name(name):
        if subset is not None or split is not None:
            raise ValueError(f"{prefix}data is the file {name!r}, which has no subset and no split")
        return
    if _HUB_NAME.fullmatch(name) is None or name.startswith("."):
        raise ValueError(
            f"{prefix}data is {name!r}, neither a data file ({', '.join(FILE_KINDS)}) nor the name of a data set on the "
            "hub (owner/name)"
        )
    if split is None:
        raise ValueError(f"{prefix}split is missing: say which split of {name!r} to read")
