"""``robust-ext show``."""

from __future__ import annotations

from pathlib import Path

import typer

from robust_ext.cli.options import command
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.evaluations.unfinished import show_run


@settings_class
class ShowOptions(Settings):
    """Options of this command."""

    run: Path = setting(help="Folder of a run, finished or not, or a result.json.", cli="RUN")


@command()
def show_command(own: ShowOptions) -> None:
    """Print the result of a run folder, or its table so far where the run is not finished."""
    typer.echo(show_run(own.run).rstrip())
