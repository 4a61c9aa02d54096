"""The `attnprobe` command. Heavy imports wait inside the commands, so that --help answers at once."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from attnprobe.cli import bench, heads, polarity, render
from attnprobe.cli.errors import plain_errors

__all__ = ["app", "main"]

DEFAULT_METHODS = ("SAUQ",)

app = typer.Typer(
    help="How sure is a language model of its answer? Reads it off the attention, in a single pass.",
    no_args_is_help=True,
    add_completion=False,
    # Only a fault of attnprobe itself shows a traceback, and then the plain one that a report needs.
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.command()(polarity.polarity)
app.command()(heads.heads)


def main() -> None:
    """The entry point of the `attnprobe` command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe that cannot show a character gets its escape instead of an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version("attnprobe")
        except metadata.PackageNotFoundError:  # run from a folder, without being installed
            import attnprobe

            version = attnprobe.__version__
        typer.echo(f"attnprobe {version}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


@app.command()
def score(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt. '-', or none at all in a pipe, reads one from standard input."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="The longest answer, in tokens.")] = 20,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="An uncertainty method; repeat it for more. Default: SAUQ."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="A hub name or a local folder. Default: SmolLM2-135M-Instruct."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line: text, uncertainty, tokens.")
    ] = False,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", help="Read prompts from a file, one a line, blank lines left out; '-' is standard input."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="For example cpu, cuda or cuda:1.")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16. Default: the checkpoint's.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="How many prompts are answered at once.")] = 8,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Answer a prompt and say how uncertain the answer is, token by token."""
    with plain_errors(debug):
        prompts = _prompts(prompt, file)
        methods = tuple(method) if method else DEFAULT_METHODS
        _check_methods(methods)
        out, progress = _console(), Console(stderr=True)
        if progress.is_terminal:  # a line, as the first load draws a progress bar of its own
            progress.print("Loading the model", style="dim")
        import attnprobe as ap

        loaded = ap.load_model(model, device=device, dtype=dtype)
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            done = f" ({start} of {len(prompts)} done)" if len(prompts) > 1 else ""
            with progress.status(f"Answering{done}"):
                scores = ap.score(
                    loaded,
                    batch,
                    methods=methods,
                    max_new_tokens=max_new_tokens,
                    chat=chat,
                    batch_size=batch_size,
                )
            for asked, answer in zip(batch, scores, strict=True):
                _print(out, answer, as_json, asked if len(prompts) > 1 else None)


@app.command()
def models() -> None:
    """Show which models are cached, where, and how much room they take."""
    from attnprobe.embedded import cache_dir, cached_models

    with plain_errors(debug=False):
        # No line is cut in a pipe, where a folder has to stay in one piece.
        out = _console(None if sys.stdout.isatty() else 10_000)
        cached = cached_models()
        if cached:
            out.print(render.models_table(cached))
        else:
            out.print(Text("Nothing is cached yet; the first `attnprobe score` fetches the embedded model."))
        out.print(Text(f"cache folder: {render.visible(str(cache_dir()))}"), soft_wrap=True)


def _check_methods(names: tuple[str, ...]) -> None:
    """Before a model is fetched and loaded for nothing."""
    from attnprobe.uncertainty.registry import resolve

    resolve(names)


def _console(width: int | None = None) -> Console:
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _print(out: Console, answer: Any, as_json: bool, prompt: str | None) -> None:
    if as_json:
        # ASCII only: JSON then escapes every character that could steer a terminal.
        typer.echo(json.dumps(render.record(answer), allow_nan=False, ensure_ascii=True))
    else:
        render.print_score(out, answer, prompt)


def _prompts(prompt: str | None, file: str | None) -> list[str]:
    """The prompts, from the one place the user named."""
    if file is not None:
        if prompt is not None:
            raise typer.BadParameter("give a prompt or --file, not both")
        found = [line for line in _read(file).replace("\r\n", "\n").split("\n") if line.strip()]
    else:
        if prompt in (None, "-") and sys.stdin is None:
            raise typer.BadParameter("standard input is closed: give a prompt or --file")
        if prompt is None and sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, --file, or text on standard input")
        text = _read("-").removesuffix("\n").removesuffix("\r") if prompt in (None, "-") else str(prompt)
        found = [text] if text.strip() else []
    if not found:
        raise typer.BadParameter("the prompt is empty")
    return found


def _read(name: str) -> str:
    source = "standard input" if name == "-" else repr(name)
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{source} is not UTF-8 text") from error
    except OSError as error:
        raise typer.BadParameter(f"cannot read {source}: {error.strerror or error}") from error


if __name__ == "__main__":
    main()
