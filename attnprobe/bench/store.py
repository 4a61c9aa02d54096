"""Results on disk: a folder that a run writes batch by batch, and that another run can go on with.

    run.json                    what was asked, by which versions
    asked.json                  how many rows of each task the last run went for
    rows/part-000001.parquet    the rows of one batch; `pandas.read_parquet(folder / "rows")` reads them all
    .lock                       held while a run writes; the system lets go of it when the process dies

A part is there in full or not at all: it is written under another name in the same folder, flushed to the disk and
then renamed. So whatever kills a run, it leaves whole batches, and the rows that are missing are the rows to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

ROWS = "rows"
RUN = "run.json"
ASKED = "asked.json"
_LOCK = ".lock"
_PART = re.compile(r"part-(\d{6,})\.parquet")
_NUMBERED = re.compile(r"part-(\d{6,})")
_FORMAT = 1
# Settings that change no row; a fingerprint does not know them.
_INDIFFERENT = ("output", "engine", "workers", "batch_size", "device", "max_rejection", "data_folder", "alignscore")

#: Every row has these, and then a column a method.
COLUMNS = ("task", "id", "prompt_tokens", "tokens", "text", "finish", "quality", "error", "seconds")


@dataclass(frozen=True)
class Row:
    """One example, answered or failed.

    Attributes:
        task, id: which example; no two rows have the same.
        prompt_tokens, tokens: length of the prompt and of the answer.
        text, finish: the answer, and why it ended.
        quality: how good the answer is, higher = better.
        error: None, or in one sentence why the row failed.
        seconds: its share of the time that its batch took.
        scores: method name -> uncertainty; empty where there is no answer.
    """

    task: str
    id: str
    prompt_tokens: int | None = None
    tokens: int | None = None
    text: str | None = None
    finish: str | None = None
    quality: float | None = None
    error: str | None = None
    seconds: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """What run.json says: the whole of what decides the rows.

    Attributes:
        config: the settings, as JSON knows them.
        fingerprint: of the settings that rows depend on; a folder holds rows of one fingerprint.
        methods: names of the columns of scores, in order.
        tasks: labels of the tasks, in order.
        model: the name of the model.
        versions: of every set of libraries that wrote rows; more than one where a run was resumed with others.
    """

    config: dict[str, Any]
    fingerprint: str
    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    model: str
    versions: tuple[dict[str, str], ...]


class Store:
    """The rows of one output folder, held for writing; made by `open_store`.

    Attributes:
        folder: where.
        done: the (task, id) pairs that are there.
        notices: sentences about what was found when the folder was opened.
    """

    def __init__(self, folder: Path, methods: Sequence[str]) -> None:
        self.folder = folder
        self.done: set[tuple[str, str]] = set()
        self.notices: list[str] = []
        self._schema = _schema(methods)
        self._last_part = 0

    def append(self, rows: Iterable[Row]) -> int:
        """Write rows as one part and return how many; those that are there already are left out.

        Raises:
            OSError: the part could not be written; nothing of it is left, and none of its rows count as done.
        """
        new: dict[tuple[str, str], Row] = {}
        for row in rows:
            key = key_of(row.task, row.id)
            if key not in self.done:
                new.setdefault(key, row)
        if new:
            path = self.folder / ROWS / f"part-{self._last_part + 1:06d}.parquet"
            self._write(_table(list(new.values()), self._schema), path)
            self._last_part += 1
            self.done |= set(new)
        return len(new)

    def expect(self, rows: Mapping[str, int]) -> None:
        """Note how many rows of each task the run goes for, so that a report can say what is missing."""
        said = json.dumps(dict(rows), indent=1)
        _replace(self.folder / ASKED, lambda partial: partial.write_text(said + "\n", encoding="utf-8"))

    def forget_failed(self) -> int:
        """Take the failed rows out, so that they are done again; returns how many there were."""
        forgotten = 0
        for path in _parts(self.folder):
            table = _read_part(path)
            failed = [error is not None for error in table["error"].to_pylist()]
            if any(failed):
                keys = _keys(table)
                self._write(table.filter([not gone for gone in failed]), path)
                self.done -= {key for key, gone in zip(keys, failed, strict=True) if gone}
                forgotten += sum(failed)
        return forgotten

    def _write(self, table: pa.Table, path: Path) -> None:
        # Checksums: a flipped bit in a number would be read as another number.
        _replace(path, lambda partial: _write_parquet(table, partial))

    def _take_stock(self) -> None:
        """Read what is there, and set aside what cannot be read."""
        _remove_unfinished(self.folder / ROWS)
        self._last_part = _last_number(self.folder)
        found = read_rows(self.folder)
        for path in found.damaged:
            aside = path.with_name(f"_damaged-{path.name}")
            os.replace(path, aside)
            self.notices.append(f"{path.name} is damaged: it is kept as {aside.name}, and its rows are done again.")
        if found.repeated:
            self.notices.append(f"{found.repeated} rows are there more than once: the first of each counts.")
        self.done = set(_keys(found.table)) if found.table is not None else set()


@contextlib.contextmanager
def open_store(folder: str | os.PathLike[str], record: Record) -> Iterator[Store]:
    """Hold an output folder for writing; a new one is made, one of the same fingerprint is gone on with.

    Raises:
        ValueError: the folder holds rows of other settings, or something that is no run, or is a file.
        RuntimeError: another run holds it.
        OSError: it cannot be made or read.
    """
    import filelock

    folder = Path(folder)
    try:
        (folder / ROWS).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"the output {str(folder)!r} is a file, or lies in one: name a folder.") from None
    lock = filelock.FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise RuntimeError(f"another run is writing to {folder}: wait for it, or name another output.") from None
    try:
        notices = _settle(folder, record)
        store = Store(folder, record.methods)
        store._take_stock()
        store.notices[:0] = notices
        yield store
    finally:
        lock.release()


def read_record(folder: str | os.PathLike[str]) -> Record:
    """What run.json of an output folder says.

    Raises:
        FileNotFoundError: the folder is not there, or is not that of a run.
        ValueError: run.json is damaged, or of another version of this format.
    """
    folder = Path(folder)
    try:
        said = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{str(folder)!r} holds no results: it has no {RUN}.") from None
    except ValueError as error:
        raise ValueError(f"{RUN} in {str(folder)!r} is damaged ({error}).") from None
    if not isinstance(said, dict) or said.get("format") != _FORMAT:
        raise ValueError(f"{RUN} in {str(folder)!r} is of another format than this version of attnprobe writes.")
    try:
        return Record(
            config=dict(said["config"]),
            fingerprint=str(said["fingerprint"]),
            methods=tuple(said["methods"]),
            tasks=tuple(said["tasks"]),
            model=str(said["model"]),
            versions=tuple(said["versions"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{RUN} in {str(folder)!r} is damaged ({error!r}).") from None


def read_asked(folder: str | os.PathLike[str]) -> dict[str, int]:
    """How many rows of each task the last run went for; nothing where it did not say."""
    try:
        said = json.loads((Path(folder) / ASKED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(task): int(n) for task, n in said.items()} if isinstance(said, dict) else {}


@dataclass(frozen=True)
class Found:
    """The rows of a folder.

    Attributes:
        table: every (task, id) once, in the order written; None where there are none.
        damaged: parts that could not be read.
        repeated: how many rows were left out because they were there already.
    """

    table: pa.Table | None
    damaged: tuple[Path, ...]
    repeated: int

    def frame(self, methods: Sequence[str]) -> pd.DataFrame:
        """The rows as a table of pandas."""
        table = self.table if self.table is not None else _schema(methods).empty_table()
        return table.to_pandas()


def read_rows(folder: str | os.PathLike[str]) -> Found:
    """Read the rows of an output folder; nothing on the disk is changed, and a run may be writing meanwhile."""
    import pyarrow as pa

    tables: list[pa.Table] = []
    damaged: list[Path] = []
    for path in _parts(Path(folder)):
        try:
            table = _read_part(path)
        except _DamagedPart:
            damaged.append(path)
            continue
        # A part of other columns is of another run: somebody has put it there.
        if tables and table.schema != tables[0].schema:
            damaged.append(path)
        else:
            tables.append(table)
    if not tables:
        return Found(None, tuple(damaged), 0)
    table = pa.concat_tables(tables)
    first = {key: place for place, key in reversed(list(enumerate(_keys(table))))}
    repeated = table.num_rows - len(first)
    return Found(table.take(sorted(first.values())) if repeated else table, tuple(damaged), repeated)


def key_of(task: str, identity: str) -> tuple[str, str]:
    """How an example is known on disk, where text is Unicode: half a surrogate pair is spelt out."""
    return _unicode(task), _unicode(identity)


def check_methods(methods: Sequence[str]) -> None:
    """Refuse names that cannot be columns.

    Raises:
        ValueError: a name is that of another column, or there twice.
    """
    for name in methods:
        if name in COLUMNS:
            raise ValueError(
                f"a method cannot be called {name!r}, as a column of the results is: give it another label."
            )
    twice = sorted({name for name in methods if methods.count(name) > 1})
    if twice:
        raise ValueError(f"two methods are called {twice[0]!r}: give one of them another label.")


# --- run.json ---------------------------------------------------------------------------------------------


def _settle(folder: Path, record: Record) -> list[str]:
    """Make run.json agree with the run that is about to write, or refuse."""
    if not (folder / RUN).exists():
        if _parts(folder):
            raise ValueError(f"{str(folder)!r} holds rows and no {RUN} that says whose: name another output.")
        _write_record(folder, record)
        return []
    old = read_record(folder)
    if old.fingerprint != record.fingerprint:
        if _all_failed(folder):  # a mistake in the settings, which have been put right
            return [_set_aside(folder, record)]
        differing = differences(_decisive(old), _decisive(record)) or ["what is in the files of data has changed"]
        raise ValueError(
            f"{str(folder)!r} holds rows of other settings ({'; '.join(differing)}): name another output, or go back "
            "to those settings."
        )
    new = [versions for versions in record.versions if versions not in old.versions]
    if not new:
        return []
    _write_record(folder, Record(**{**vars(old), "versions": (*old.versions, *new)}))
    said = "; ".join(differences(old.versions[-1], new[-1]))
    return [f"the rows that are there were written by other versions ({said})."]


def _all_failed(folder: Path) -> bool:
    """There are rows, all of them can be read, and none has an answer."""
    found = read_rows(folder)
    return found.table is not None and not found.damaged and found.table["error"].null_count == 0


def _set_aside(folder: Path, record: Record) -> str:
    """Keep the parts of a run in which everything failed under other names, and begin another in its folder."""
    parts = _parts(folder)
    for path in parts:
        os.replace(path, path.with_name(f"_failed-{path.name}"))
    _write_record(folder, record)
    return (
        f"all rows of the last run had failed, under other settings: its {len(parts)} parts are kept as _failed-... ."
    )


def _decisive(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.config.items() if name not in _INDIFFERENT}


def differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Where two settings differ, as `place: old is now new`, with lists of other lengths as a whole.

    >>> differences({"model": "a", "tasks": [{"n": 1}]}, {"model": "a", "tasks": [{"n": 2}]})
    ['tasks[0].n: 1 is now 2']
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = dict.fromkeys((*old, *new))
        pairs = [(f"{place}.{name}" if place else str(name), old.get(name), new.get(name)) for name in names]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(old, new, strict=True))]
    else:
        return [] if old == new else [f"{place}: {_short(old)} is now {_short(new)}"]
    return [found for name, a, b in pairs for found in differences(a, b, name)]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _write_record(folder: Path, record: Record) -> None:
    said = json.dumps({"format": _FORMAT, **vars(record)}, indent=1)
    _replace(folder / RUN, lambda partial: partial.write_text(said + "\n", encoding="utf-8"))


# --- files ------------------------------------------------------------------------------------------------


def _replace(path: Path, write: Any) -> None:
    """Write a file so that it is there in full or not at all, whatever happens, a power failure too."""
    # Hidden, so that readers of the folder do not see it; in the same folder, so that renaming it is one step.
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = error.strerror or " ".join(str(error).split())
            raise OSError(
                error.errno,
                f"cannot write {path.name} in {str(path.parent)!r} ({reason}): all rows before it are kept, and the "
                "same command goes on after them",
            ) from error
        raise
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    # The new name is an entry of the folder, which is flushed by itself; Windows has no such call.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_unfinished(folder: Path) -> None:
    # Only the holder of the lock makes these, so that one found now was left by a run that was killed.
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def _parts(folder: Path) -> list[Path]:
    """The parts of a folder in the order written."""
    rows = folder / ROWS
    if not rows.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in rows.iterdir() if (match := _PART.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def _last_number(folder: Path) -> int:
    # Damaged parts count too: a name is never given twice.
    names = (path.name for path in (folder / ROWS).iterdir())
    return max((int(match[1]) for name in names if (match := _NUMBERED.search(name))), default=0)


# --- Parquet ----------------------------------------------------------------------------------------------


class _DamagedPart(Exception):
    pass


def _schema(methods: Sequence[str]) -> pa.Schema:
    import pyarrow as pa

    check_methods(methods)
    types = dict.fromkeys(COLUMNS, pa.string())
    types.update(prompt_tokens=pa.int64(), tokens=pa.int64(), quality=pa.float64(), seconds=pa.float64())
    required = [pa.field(name, types[name], nullable=name not in ("task", "id")) for name in COLUMNS]
    return pa.schema([*required, *(pa.field(_unicode(name), pa.float64()) for name in methods)])


def _table(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    for name in ("task", "id", "text", "finish", "error"):
        columns[name] = [None if text is None else _unicode(text) for text in columns[name]]
    scores = [{_unicode(name): value for name, value in row.scores.items()} for row in rows]
    for name in schema.names[len(COLUMNS) :]:
        columns[name] = [found.get(name) for found in scores]
    return pa.table(columns, schema=schema)


def _write_parquet(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path, write_page_checksum=True)


def _read_part(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Read first, apart from the decoding: a disk that fails to read is another thing than a damaged part.
    data = path.read_bytes()
    try:
        table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _DamagedPart(str(path)) from error
    if tuple(table.column_names[: len(COLUMNS)]) != COLUMNS:
        raise _DamagedPart(str(path))
    return table


def _keys(table: pa.Table) -> list[tuple[str, str]]:
    return list(zip(table["task"].to_pylist(), table["id"].to_pylist(), strict=True))


def _unicode(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
