"""A run from its configuration to its results; begun, gone on with, or found to be complete."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from attnprobe.bench.config import RunConfig, load_config
from attnprobe.bench.engine import Batch, batches, local, methods_of
from attnprobe.bench.progress import Bars
from attnprobe.bench.store import Record, Row, Store, key_of, open_store, read_record, read_rows

if TYPE_CHECKING:
    import pandas as pd

    from attnprobe.bench.example import Example

_LIBRARIES = ("torch", "transformers", "transformer-lens", "numpy")
Engine = Callable[[RunConfig, Sequence[Batch]], Iterator[list[Row]]]


@dataclass(frozen=True)
class Results:
    """What is in an output folder.

    Attributes:
        output: the folder.
        record: what was run, by which versions.
        notices: what a user should know about the run, a sentence each.
        new: how many rows were computed just now.
    """

    output: Path
    record: Record
    notices: tuple[str, ...] = ()
    new: int = 0

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The rows: task, id, prompt_tokens, tokens, text, finish, quality, error, seconds, and a column a method."""
        return read_rows(self.output).frame(self.record.methods)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.frame)

    @property
    def failed(self) -> int:
        """How many of them failed."""
        return int(self.frame["error"].notna().sum())

    @property
    def first_error(self) -> str | None:
        """Why the first of them failed."""
        errors = self.frame["error"].dropna()
        return None if errors.empty else str(errors.iloc[0])

    @property
    def empty(self) -> int:
        """How many answers have no text: the model ended at once, or began with what ends an answer."""
        return int((self.frame["text"].fillna("x").str.strip() == "").sum())

    def __str__(self) -> str:
        said = f"{self.rows} rows in {self.output} ({self.new} of them new)"
        if self.empty:
            said += (
                f"; {self.empty} answers are empty (does the model expect its chat template, `chat: true`, or begin "
                "with what ends an answer, `stop`?)"
            )
        return f"{said}; {self.failed} failed, the first of them so: {self.first_error}" if self.failed else f"{said}."


def run(
    config: RunConfig | str | os.PathLike[str],
    *,
    progress: bool = True,
    limit: int | None = None,
    retry_failed: bool = False,
) -> Results:
    """Answer and score every example of every task that is not in the output folder yet.

    Rows are stored batch by batch. Whatever ends a run (an interrupt, a full disk, a killed process), the same call
    goes on where it ended, and no row is lost or computed twice.

    Args:
        config: a `RunConfig`, or the path of its YAML file.
        progress: bars on standard error, if that is a terminal.
        limit: only the first so many examples of every task; a later run without it does the others.
        retry_failed: do the rows again that are there and failed.

    Returns:
        `Results`; `report(config.output)` makes tables of them.

    Raises:
        ValueError: something in the configuration or the data, or the output holds rows of other settings.
        RuntimeError: another run holds the output, or the device has failed.
        OSError: the model cannot be had, or the results cannot be written.
        ImportError: the extra packages of the benchmark are not installed.
    """
    from attnprobe.bench.extra import need

    need("pyarrow")
    if not isinstance(config, RunConfig):
        config = load_config(config)
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit!r}: use a whole number of at least 1.")
    record = describe(config)
    with open_store(config.output, record) as store:
        notices = list(store.notices)
        if retry_failed and (again := store.forget_failed()):
            notices.append(f"{again} rows that had failed are done again.")
        before = len(store.done)
        examples = [_examples(config, task)[:limit] for task in range(len(config.tasks))]
        store.expect({task.label: len(found) for task, found in zip(config.tasks, examples, strict=True)})
        _work(config, store, examples, progress)
        return Results(config.output, record, tuple(notices), len(store.done) - before)


def describe(config: RunConfig) -> Record:
    """What a run records about itself."""
    from attnprobe.embedded import EMBEDDED_MODEL

    return Record(
        config=config.model_dump(mode="json"),
        fingerprint=config.fingerprint(),
        methods=tuple(method.name for method in methods_of(config)),
        tasks=tuple(task.label for task in config.tasks),
        model=EMBEDDED_MODEL if config.model is None else str(config.model),
        versions=(library_versions(),),
    )


def results(output: str | os.PathLike[str]) -> Results:
    """What an output folder holds; a run may be writing to it.

    Raises:
        FileNotFoundError, ValueError: it is not the folder of a run, or is damaged.
    """
    return Results(Path(output), read_record(output))


def _work(config: RunConfig, store: Store, examples: Sequence[Sequence[Example]], progress: bool) -> None:
    labels = [task.label for task in config.tasks]
    todo = [
        batch
        for task, label in enumerate(labels)
        for whole in batches(task, examples[task], config.batch_size)
        if (batch := _missing(whole, label, store.done)).examples
    ]
    if not todo:
        return
    totals = {label: len(found) for label, found in zip(labels, examples, strict=True)}
    missing = Counter(labels[batch.task] for batch in todo for _ in batch.examples)
    done = {label: total - missing[label] for label, total in totals.items()}
    with Bars(totals, done, progress) as bars:
        for rows in _engine(config)(config, todo):
            bars.advance(rows[0].task, store.append(rows))


def _missing(batch: Batch, label: str, done: set[tuple[str, str]]) -> Batch:
    return Batch(batch.task, tuple(one for one in batch.examples if key_of(label, one.id) not in done))


def _engine(config: RunConfig) -> Engine:
    if config.engine == "local":
        return local
    from attnprobe.bench.engine_ray import on_ray

    return on_ray


def _examples(config: RunConfig, task: int) -> list[Example]:
    from attnprobe.bench.tasks import examples

    found = list(examples(config.tasks[task], seed=config.seed))
    label = config.tasks[task].label
    names = Counter(key_of(label, example.id) for example in found)
    twice = next((name for name, times in names.items() if times > 1), None)
    if twice is not None:
        raise ValueError(f"the task {label!r} has two examples with the id {twice[1]!r}: rows are told apart by it.")
    return found


def library_versions() -> dict[str, str]:
    """The versions of this package, Python and the libraries that numbers come from."""
    import attnprobe

    said = {"attnprobe": attnprobe.__version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            said[library] = metadata.version(library)
        except metadata.PackageNotFoundError:  # on the path without being installed
            said[library] = "unknown"
    return said
