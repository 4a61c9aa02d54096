"""Rows of a data set: a file on this machine, or a data set on the hub.

A JSONL file is read line by line with `json` and a CSV file with `csv` as text alone, so that nobody guesses types: an
id of 007, an answer of NA and a year stay what the file says, and a mistake has a line number.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from attnprobe.bench.extra import need

FILE_KINDS = (".jsonl", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")


@dataclass(frozen=True)
class Table:
    """Rows as they were found.

    Attributes:
        name: what to call them in an error.
        rows: column -> value, row by row.
        text_only: every value is text, as in a CSV file; a list is then written as JSON in its cell.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    text_only: bool = False


def is_file_name(name: str) -> bool:
    """Whether `name` means a file here rather than a data set on the hub.

    >>> is_file_name("rows/triviaqa.jsonl"), is_file_name("mandarjoshi/trivia_qa")
    (True, False)
    """
    return PurePath(name).suffix.lower() in FILE_KINDS


def check_source(name: str, subset: str | None, split: str | None, prefix: str = "") -> None:
    """Whether these can name rows at all; `prefix` is that of the keys in the configuration.

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
            f"{prefix}data is {name!r}, neither a data file ({', '.join(FILE_KINDS)}) nor the name of a data set on "
            "the hub (owner/name)"
        )
    if split is None:
        raise ValueError(f"{prefix}split is missing: say which split of {name!r} to read")


def read_table(name: str, subset: str | None = None, split: str | None = None) -> Table:
    """All rows of a file or of a split on the hub. Code that comes with a data set is never run.

    Raises:
        ValueError: they cannot be read, or there are none; in one sentence.
        ImportError: a package that reading needs is not installed.
    """
    if not is_file_name(name):
        table = Table(f"{name} ({split})", _from_hub(name, subset, split))
    else:
        kind = PurePath(name).suffix.lower()
        read = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}[kind]
        table = Table(repr(name), read(name), text_only=kind == ".csv")
    if len(table.rows) == 0:
        raise ValueError(f"{table.name} has no rows")
    return table


def _jsonl(name: str) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    # Not splitlines(): a line separator of Unicode may stand inside a text.
    for number, line in enumerate(_decoded(name).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or type(error).__name__
            raise ValueError(f"line {number} of {name!r} is not JSON: {reason}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {name!r} is no JSON object but a {type(row).__name__}")
        rows.append(row)
    return rows


def _csv(name: str) -> list[Mapping[str, Any]]:
    text = _decoded(name)
    rows: list[Mapping[str, Any]] = []
    # Not pandas, which fills up a row that breaks off. An article may be longer than the reader's own limit, which is
    # one for the whole process.
    limit = csv.field_size_limit(max(len(text), 1))
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        columns = next(reader, [])
        if len(set(columns)) < len(columns):
            raise ValueError(f"{name!r} has a column twice in its first line")
        for cells in filter(None, reader):
            if len(cells) != len(columns):
                raise ValueError(
                    f"the row that ends in line {reader.line_num} of {name!r} has {len(cells)} cells, and the first "
                    f"line names {len(columns)}"
                )
            rows.append(dict(zip(columns, cells, strict=True)))
    except csv.Error as error:
        raise ValueError(f"{name!r} is not a CSV file that can be read: {error}") from None
    finally:
        csv.field_size_limit(limit)
    return rows


def _parquet(name: str) -> list[Mapping[str, Any]]:
    pyarrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    try:
        rows: list[Mapping[str, Any]] = parquet.read_table(name).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{name!r} is not a Parquet file that can be read: {_first_line(error)}") from None
    return rows


def _from_hub(name: str, subset: str | None, split: str | None) -> Any:
    datasets = need("datasets")
    try:
        # trust_remote_code is never passed, and from its version 4 on the library has no way to run a script.
        return datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        # Whatever the network, the hub, a cache or a builder came up with: the way out is the same.
        raise ValueError(
            f"the data set {name!r} ({split}) cannot be read from the hub: {_first_line(error)}; a file on this "
            "machine can be given as data instead"
        ) from error


def _decoded(name: str) -> str:
    try:
        return Path(name).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name!r} is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{name!r} cannot be read: {error.strerror or error}") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
