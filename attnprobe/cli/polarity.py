"""`attnprobe polarity`: which way transport features point on hallucinated answers, and whether two data sets agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from attnprobe.cli.errors import plain_errors
from attnprobe.cli.sections import print_sections
from attnprobe.text import visible


def polarity(
    data: Annotated[
        str,
        typer.Argument(
            help="Labelled answers: a recipe such as halueval_qa (from the hub), RECIPE=FILE, a file with the columns "
            "prompt, answer and label (JSONL, CSV, Parquet), or a YAML file that says which column is what."
        ),
    ],
    second: Annotated[
        str | None, typer.Argument(metavar="[DATA2]", help="A second data set, to see whether polarity reverses.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A hub name or a local folder. Default: SmolLM2-135M-Instruct.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder of features and results; the same command goes on in it.")
    ] = Path("polarity"),
    rows: Annotated[
        int | None, typer.Option("--rows", min=2, help="At most so many questions of each data set, drawn by seed.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=17, help="Prompt and answer together; longer prompts lose their middle. Default: 1024."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the questions drawn, resamples, permutations.")] = 0,
    bins: Annotated[int, typer.Option("--bins", min=1, help="Length bins of the length-controlled AUROC.")] = 5,
    permutations: Annotated[int, typer.Option("--permutations", min=1, help="Of labels, for p-values.")] = 9999,
    resamples: Annotated[int, typer.Option("--resamples", min=1, help="Of questions, for intervals.")] = 1000,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="How many answers are read at once.")] = 8,
    device: Annotated[str | None, typer.Option("--device", help="For example cpu, cuda or cuda:1.")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16. Default: the checkpoint's.")
    ] = None,
    row_policy: Annotated[
        str, typer.Option("--row-policy", help="'renormalize' for models whose attention rows do not sum to 1.")
    ] = "error",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars and no tables.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """See which way attention's capacity and direction point on hallucinated answers, beside the length alone."""
    with plain_errors(debug):
        from attnprobe.polarity.answers import answers_of
        from attnprobe.polarity.run import check_sources, polarity_study
        from attnprobe.polarity.study import StudySettings

        settings = StudySettings(bins=bins, resamples=resamples, permutations=permutations, seed=seed)
        sources = check_sources([name for name in (data, second) if name is not None])
        for source in sources:  # before a model is loaded for nothing
            answers_of(source)
        import attnprobe as ap
        from attnprobe.embedded import EMBEDDED_MODEL

        study = polarity_study(
            ap.load_model(model, host="transformers", device=device, dtype=dtype),
            sources,
            out=out,
            questions=rows,
            max_tokens=max_tokens,
            batch_size=batch_size,
            seed=seed,
            settings=settings,
            rows=row_policy,
            model_name=EMBEDDED_MODEL if model is None else model,
            progress=not quiet,
        )
        if as_json:
            typer.echo(json.dumps(study.summary(), allow_nan=False))
        elif not quiet:
            print_sections(study.sections())
        for notice in study.notices:
            typer.echo(f"note: {visible(notice)}", err=True)
