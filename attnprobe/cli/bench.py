"""`attnprobe bench`: run a benchmark from a file, and make tables of what is in its output folder."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from attnprobe.cli.errors import plain_errors
from attnprobe.cli.sections import print_sections
from attnprobe.text import visible

app = typer.Typer(
    help="Score a model on whole tasks, and rank the methods by how well they tell good answers from bad ones.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class EngineName(str, Enum):
    """Where the work is done."""

    local = "local"
    ray = "ray"


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="The YAML file that says which model, methods and tasks.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder of the results, instead of the file's.")
    ] = None,
    engine: Annotated[
        EngineName | None, typer.Option("--engine", help="'local', or 'ray' for several copies of the model.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Copies of the model, with ray.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many of every task.")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Do the rows again that failed.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars and no summary.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Answer and score every example of every task. The same command goes on with a run that was interrupted."""
    with plain_errors(debug):
        from attnprobe.bench.config import load_config
        from attnprobe.bench.runner import run as run_benchmark

        changes: dict[str, Any] = {"output": output, "engine": engine and engine.value, "workers": workers}
        settings = load_config(config)
        settings = settings.model_copy(update={name: value for name, value in changes.items() if value is not None})
        results = run_benchmark(settings, progress=not quiet, limit=limit, retry_failed=retry_failed)
        for notice in results.notices:
            typer.echo(f"note: {visible(notice)}", err=True)
        if results.rows and results.failed == results.rows:
            raise RuntimeError(f"all {results.rows} rows failed, the first of them so: {results.first_error}")
        if not quiet:
            typer.echo(visible(str(results)))


@app.command()
def prompts(
    config: Annotated[Path, typer.Argument(help="The YAML file of a run.")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many prompts of each task.")] = 1,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show the first prompts of every task as the model will get them, few-shot examples and all. Loads no model."""
    with plain_errors(debug):
        from attnprobe.bench.config import load_config
        from attnprobe.bench.tasks import examples

        settings = load_config(config)
        for task in settings.tasks:
            for example in examples(task, seed=settings.seed)[:count]:
                answers = visible(str(list(example.references)))
                typer.echo(f"--- {visible(task.label)}, {visible(example.id)}; answers: {answers}")
                typer.echo("\n".join(visible(line) for line in example.prompt.split("\n")))


@app.command()
def report(
    outputs: Annotated[list[Path], typer.Argument(help="Output folders of one run or several.")],
    csv: Annotated[Path | None, typer.Option("--csv", help="Write every figure to this file, a line each.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")] = None,
    latex: Annotated[Path | None, typer.Option("--latex", help="Write the tables as LaTeX.")] = None,
    max_rejection: Annotated[
        float | None, typer.Option("--max-rejection", help="Reject at most this fraction. Default: the run's.")
    ] = None,
    metric: Annotated[str, typer.Option("--metric", help="'prr', or 'auroc' where a quality is 0 or 1.")] = "prr",
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Compare all others with this method. Default: SAUQ.")
    ] = None,
    level: Annotated[float, typer.Option("--level", help="Confidence level of the intervals.")] = 0.9,
    resamples: Annotated[int, typer.Option("--resamples", min=1, help="Fewer are quicker and rougher.")] = 1000,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Print how well each method ranks answers, task by task; a run may be going on meanwhile."""
    with plain_errors(debug):
        for path in (csv, markdown, latex):  # before minutes of resampling
            if path is not None and not path.absolute().parent.is_dir():
                raise FileNotFoundError(
                    f"there is no folder {str(path.parent)!r} to write {path.name!r} to: make it first."
                )
        from attnprobe.bench.reporting import report as make_report

        with Console(stderr=True).status("Resampling"):  # a minute or two for thousands of answers
            made = make_report(
                list(outputs),
                max_rejection=max_rejection,
                level=level,
                metric=metric,
                baseline=baseline,
                resamples=resamples,
                permutations=resamples,
            )
        print_sections(made.sections())
        for notice in made.notices:
            typer.echo(f"note: {visible(notice)}", err=True)
        for path, write in ((csv, made.to_csv), (markdown, made.to_markdown), (latex, made.to_latex)):
            if path is not None:
                write(path)
