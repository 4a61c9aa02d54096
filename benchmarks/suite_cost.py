"""What scoring by every method costs, beside the bare generation of the same answers.

    python benchmarks/suite_cost.py                       # 20 prompts from README and docs
    python benchmarks/suite_cost.py --config FILE --data-folder FOLDER --task SQuAD   # the first rows of a task

The bare host reads the same batches, padded alike, and generates as many tokens by its own `generate`. Sets of methods
run interleaved with it. Time is that of the processor on one thread; the ratio of a round is to the bare host of the
same round, and "own" is total / (total - what passes inside the probe's own calls), which does not see how fast the
rest happened to be.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import typer
from rich.console import Console
from rich.table import Table

import attnprobe as ap
from attnprobe.uncertainty import method_names
from benchmarks.own_time import own_time

REPOSITORY = Path(__file__).resolve().parent.parent
_OTHER_MEASURES = ("SAUQ-counting", "SAUQ-positional", "SAUQ-zipf", "SAUQ-unembedding")


@dataclass(frozen=True)
class Rows:
    """What is asked: prompts, the longest first, how long answers may be, and what ends them."""

    prompts: list[str]
    max_new_tokens: int
    stop: list[str]
    chat: bool


@dataclass
class Timed:
    """Seconds of every round, and the ratio by the probe's own calls."""

    seconds: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)


def method_sets() -> dict[str, list[str]]:
    """Methods that are asked for together: one, all but the four further measures of SAUQ, and all."""
    every = method_names(sampled=False)
    return {
        "SAUQ": ["SAUQ"],
        "one measure": [name for name in every if name not in _OTHER_MEASURES],
        "all": every,
    }


def from_repository(count: int, max_new_tokens: int) -> Rows:
    """Pieces of README and docs of 100 to 1500 characters, to go on from."""
    text = "".join(path.read_text() for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))))
    lengths = [100 + 1400 * i // max(1, count - 1) for i in range(count)]
    starts = [len(text) * i // (count + 1) for i in range(count)]
    prompts = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return Rows(sorted(prompts, key=len, reverse=True), max_new_tokens, [], False)


def from_task(config_path: Path, data_folder: Path | None, task_name: str | None, count: int) -> Rows:
    """The first rows of a task of a configuration (the first task, unless one is named)."""
    from attnprobe.bench import examples, load_config

    config = load_config(config_path, data_folder=data_folder)
    task = next((task for task in config.tasks if task_name in (None, task.label)), None)
    if task is None:
        raise typer.BadParameter(f"{config_path} has no task {task_name!r}")
    prompts = [example.prompt for example in examples(task, seed=config.seed)[:count]]
    chat = config.chat if task.chat is None else task.chat
    return Rows(sorted(prompts, key=len, reverse=True), task.max_new_tokens, list(task.stop), chat)


def scored(model: Any, rows: Rows, methods: list[str], batch_size: int) -> list[Any]:
    """The answers and their scores."""
    return ap.score(
        model,
        rows.prompts,
        methods=methods,
        max_new_tokens=rows.max_new_tokens,
        stop=rows.stop or None,
        chat=rows.chat,
        batch_size=batch_size,
    )


@torch.no_grad()
def bare(model: Any, answers: list[Any], batch_size: int) -> None:
    """The host's own greedy generation: the same batches, as many tokens as the longest answer of each took."""
    for low in range(0, len(answers), batch_size):
        batch = answers[low : low + batch_size]
        width = max(len(answer.prompt_ids) for answer in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, answer in enumerate(batch):
            ids[i, width - len(answer.prompt_ids) :] = torch.tensor(answer.prompt_ids)
            mask[i, width - len(answer.prompt_ids) :] = 1
        tokens = max(len(answer.token_ids) for answer in batch)
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )


def timed(run: Callable[[], object], figures: Timed) -> None:
    """One run, its time and the share of it that is the probe's own."""
    with own_time() as own:
        started = time.process_time()
        run()
        seconds = time.process_time() - started
    figures.seconds.append(seconds)
    figures.own.append(seconds / (seconds - own.seconds))


def main(
    config: Annotated[Path | None, typer.Option(help="A configuration of `attnprobe bench`.")] = None,
    data_folder: Annotated[Path | None, typer.Option(help="Where the files of its tasks are.")] = None,
    task: Annotated[str | None, typer.Option(help="Which of its tasks; the first by default.")] = None,
    count: Annotated[int, typer.Option("--rows", min=1, help="How many rows.")] = 20,
    new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, without a configuration.")] = 32,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
) -> None:
    """Cost of scoring rows by every single-pass method."""
    torch.set_num_threads(1)
    model = ap.load_model(host="transformers")
    rows = from_repository(count, new_tokens) if config is None else from_task(config, data_folder, task, count)
    answers = scored(model, rows, ["Perplexity"], batch_size)  # also warms up
    runs: dict[str, Callable[[], object]] = {"bare": lambda: bare(model, answers, batch_size)}
    for name, methods in method_sets().items():
        runs[name] = partial(scored, model, rows, methods, batch_size)
    figures = {name: Timed() for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            timed(run, figures[name])

    console = Console()
    lengths = [len(answer.prompt_ids) for answer in answers]
    tokens = sum(len(answer.token_ids) for answer in answers)
    console.print(f"{len(answers)} rows of {min(lengths)} to {max(lengths)} tokens, {tokens} tokens answered")
    table = Table("methods", "number", "seconds", "ratio", "rounds", "own")
    for name, one in figures.items():
        ratios = [a / b for a, b in zip(one.seconds, figures["bare"].seconds, strict=True)]
        table.add_row(
            name,
            str(len(method_sets().get(name, []))),
            f"{statistics.median(one.seconds):.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}",
            f"{statistics.median(one.own):.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
