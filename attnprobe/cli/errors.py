"""How the commands say what went wrong."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import typer

from attnprobe.text import visible

USAGE, FAILURE = 2, 1


@contextlib.contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """Say a mistake in one sentence and leave with the status that goes with it.

    2 for something the user can put right in the call (a wrong value, a folder that is not there), 1 for a
    failure while running. Everything else is a fault of attnprobe and keeps its traceback.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has left, as `head` does: typer ends quietly
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if isinstance(error, typer.Exit | typer.Abort):  # these are RuntimeErrors too
            raise
        if debug:
            traceback.print_exc()
        message = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"error: {visible(message)}", err=True)
        wrong_call = isinstance(error, ValueError | TypeError | FileNotFoundError)
        raise typer.Exit(USAGE if wrong_call else FAILURE) from error
