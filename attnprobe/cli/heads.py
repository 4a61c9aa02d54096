"""`attnprobe heads`: what every head of a model does while it reads texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from attnprobe.cli.errors import plain_errors
from attnprobe.cli.sections import print_sections


def heads(
    model: Annotated[str, typer.Argument(help="A hub name, a local folder, or 'embedded' for SmolLM2-135M-Instruct.")],
    texts: Annotated[
        Path,
        typer.Argument(help="A text file, a folder of them, or a table with a column of texts (JSONL, CSV, Parquet)."),
    ],
    field: Annotated[str, typer.Option("--field", help="The column of a table that has the text.")] = "text",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many texts.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="What is read of a text, from its start.")
    ] = 1024,
    min_tokens: Annotated[int, typer.Option("--min-tokens", min=1, help="Shorter texts are left out.")] = 32,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder of readings and tables; the same command goes on in it.")
    ] = Path("heads"),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the resamples of the intervals.")] = 0,
    resamples: Annotated[int, typer.Option("--resamples", min=1, help="Of the intervals.")] = 2000,
    device: Annotated[str | None, typer.Option("--device", help="For example cpu, cuda or cuda:1.")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16. Default: the checkpoint's.")
    ] = None,
    row_policy: Annotated[
        str, typer.Option("--row-policy", help="'renormalize' for models whose attention rows do not sum to 1.")
    ] = "error",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no tables.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure every head of a model on texts: sinks, routing, spectra, roles, and how these go together."""
    with plain_errors(debug):
        from attnprobe.atlas.correlation import Resampling
        from attnprobe.atlas.report import sections, summary, write
        from attnprobe.atlas.texts import read_texts

        read = read_texts(texts, field)[:limit]  # before a model is loaded for nothing
        import attnprobe as ap
        from attnprobe.embedded import EMBEDDED_MODEL

        embedded = model == "embedded"
        atlas = ap.head_atlas(
            ap.load_model(None if embedded else model, host="transformers", device=device, dtype=dtype),
            read,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            folder=out / "readings",
            resampling=Resampling(resamples=resamples, seed=seed),
            rows=row_policy,
            model_name=EMBEDDED_MODEL if embedded else model,
            progress=not quiet,
        )
        write(atlas, out)
        if as_json:
            typer.echo(json.dumps(summary(atlas), allow_nan=False))
        elif not quiet:
            print_sections(sections(atlas))
