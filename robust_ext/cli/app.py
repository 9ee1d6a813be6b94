"""The command line: ``robust-ext`` with one command an evaluation."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from robust_ext import __version__
from robust_ext.cli.adaptive import adaptive_command
from robust_ext.cli.attacks import attacks
from robust_ext.cli.binarization import binarization
from robust_ext.cli.demo import demo
from robust_ext.cli.mead import mead_command
from robust_ext.cli.robust_accuracy import robust_accuracy_command
from robust_ext.core.errors import RobustExtError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Can this robustness evaluation be trusted? Tests of adversarial attacks for Foolbox, ART and PyTorch.",
)
app.command("binarization")(binarization)
app.command("mead")(mead_command)
app.command("robust-accuracy")(robust_accuracy_command)
app.command("test-time")(adaptive_command)
app.command("demo")(demo)
app.command("attacks")(attacks)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"robust-ext {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log to stderr.")] = False,
) -> None:
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")


def main() -> None:
    """Run the command line; errors of this project end it with a line on stderr and status 2."""
    try:
        app()
    except RobustExtError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None
