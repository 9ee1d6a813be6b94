"""``robust-ext compare``."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from robust_ext.cli.options import command
from robust_ext.core.files import replace_file
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.evaluations.comparison import compare


@settings_class
class CompareOptions(Settings):
    """Options of this command."""

    runs: tuple[str, ...] = setting(help="Two or more run folders of one kind of evaluation.", cli="RUN...")
    json_file: Path | None = setting(default=None, help="Write the comparison to this file.", cli="--json", panel="run")


@command()
def compare_command(own: CompareOptions) -> None:
    """Compare runs with the first of them: verdicts, scores, settings and versions."""
    found = compare(*own.runs)
    if own.json_file is not None:
        replace_file(own.json_file, json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")
    typer.echo(str(found).rstrip())
