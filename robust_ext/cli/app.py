"""The command line: ``robust-ext`` with one command an evaluation."""

from __future__ import annotations

import io
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from robust_ext import __version__
from robust_ext.cli.evaluations import accuracy, at_test_time, binarization, diagnosis, evaluation
from robust_ext.cli.mead import mead_command
from robust_ext.cli.others import attacks, casestudies, compare_runs, demo, reproduction, show
from robust_ext.cli.run import run_study
from robust_ext.core.errors import RobustExtError, on_stderr, printable
from robust_ext.engine.isolation.process import hide_arguments

_LONGEST = 2000


class _Group(TyperGroup):
    """The group of commands; its errors repeat the command line without control characters."""

    def make_context(self, *arguments: Any, **keywords: Any) -> Any:
        with _escaped():
            return super().make_context(*arguments, **keywords)

    def invoke(self, *arguments: Any, **keywords: Any) -> Any:
        with _escaped():
            return super().invoke(*arguments, **keywords)


@contextmanager
def _escaped() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Usage errors have their text here, in every release of typer and click.
        if isinstance(getattr(error, "message", None), str):
            error.message = printable(error.message)  # type: ignore[attr-defined]
        raise


class _Lines(logging.Formatter):
    """Log messages without control characters, which names of attacks may hold."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Once(logging.Filter):
    """A filter that passes each message once: an attack warns in each block of samples."""

    def __init__(self) -> None:
        super().__init__()
        self._shown = set[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in self._shown
        self._shown.add(text)
        return new


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Can this robustness evaluation be trusted? Tests of adversarial attacks for Foolbox, ART and PyTorch.",
)
app.command("evaluate")(evaluation)
app.command("binarization")(binarization)
app.command("diagnose")(diagnosis)
app.command("mead")(mead_command)
app.command("robust-accuracy")(accuracy)
app.command("test-time")(at_test_time)
app.command("run")(run_study)
app.command("casestudies")(casestudies)
app.command("reproduce")(reproduction)
app.command("compare")(compare_runs)
app.command("show")(show)
app.command("demo")(demo)
app.command("attacks")(attacks)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"robust-ext {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log to stderr.")] = False,
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(name)s: %(message)s" if verbose else "%(message)s"))
    if not verbose:
        handler.addFilter(_Once())
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    context.with_resource(on_stderr())


def main() -> None:
    """Run the command line: status 0 with a result, 2 with a line on stderr for an error.

    An unexpected error has status 1; ``--verbose`` shows where it was raised.
    """
    hide_arguments()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character is no reason to lose a result.
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except RobustExtError as error:
        _end(str(error), status=2, traced=False)
    except OSError as error:
        _end(f"{error.strerror}: {error.filename}" if error.filename else str(error), status=2)
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):
            _end(f"not enough memory ({error}); take fewer --samples or a smaller --batch-size", status=2)
        text = f"unexpected {type(error).__name__}: {error}"
        _end(f"{text}; robust-ext --verbose shows the traceback, to be included in a bug report", status=1)


def _end(text: str, *, status: int, traced: bool = True) -> None:
    if traced and logging.getLogger().isEnabledFor(logging.INFO):
        typer.echo(printable(traceback.format_exc()), err=True)
    # Arguments may be long, and weights may not fit by every one of their names.
    shown = re.sub(r"(\S{50})\S{100,}(\S{50})", r"\1...\2", text)
    if len(shown) > _LONGEST:
        shown = f"{shown[: _LONGEST // 2]} ... {shown[-_LONGEST // 2 :]}"
    typer.echo(f"error: {printable(shown)}", err=True)
    raise SystemExit(status) from None
