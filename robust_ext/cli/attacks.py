"""``robust-ext attacks``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from tqdm.auto import tqdm

from robust_ext.cli.options import command
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.registry.base import adapters
from robust_ext.reports.attack_list import attack_table, list_attacks
from robust_ext.reports.conformance import matrix_page, matrix_table


@settings_class
class AttacksOptions(Settings):
    """Options of this command."""

    matrix: bool = setting(
        default=False,
        help="Run each of them on a small target, with small settings; takes minutes.",
        cli="--matrix",
        panel="attack",
    )
    library: tuple[str, ...] = setting(
        default=(), help="Only this library's; repeatable. All that are installed when left out.", panel="attack"
    )
    json_file: Path | None = setting(
        default=None, help="Write the list or the matrix to this file.", cli="--json", panel="run"
    )
    markdown: Path | None = setting(default=None, help="Write the matrix to this file as documentation.", panel="run")
    seed: int = setting(default=0, help="Of every draw of the matrix.", minimum=0, panel="run")
    progress: bool = setting(default=True, help="Show a progress bar.", panel="run")


@command()
def attacks(own: AttacksOptions) -> None:
    """List the attacks that can be named on the command line, or see which of them run (--matrix)."""
    libraries = list(own.library) or None
    rows, missing = (_matrix(libraries, own.seed, own.progress), []) if own.matrix else list_attacks(libraries)
    if own.json_file is not None:
        own.json_file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if own.markdown is not None:
        if not own.matrix:
            raise InvalidArgumentError("--markdown", str(own.markdown), "to be given together with --matrix")
        names = dict.fromkeys(row["library"] for row in rows)
        outcomes = {(row["library"], row["attack"], row["target"]): row["outcome"] for row in rows}
        page = matrix_page({name: adapters()[name].list_attacks() for name in names}, outcomes)
        own.markdown.write_text(page, encoding="utf-8")
    for line in missing:
        typer.echo(line, err=True)
    typer.echo(matrix_table(rows).rstrip() if own.matrix else attack_table(rows))


def _matrix(libraries: list[str] | None, seed: int, progress: bool) -> list[dict[str, Any]]:
    # It imports pytest's helpers, which no other command needs.
    from robust_ext.testing.conformance import Row, conformance

    with tqdm(disable=not progress, unit="run", desc="attacks") as bar:

        def show(row: Row | None, total: int) -> None:
            bar.total = total
            if row is not None:
                bar.set_postfix_str(f"{row.library}:{row.attack}", refresh=False)
                bar.update()

        return [row.to_dict() for row in conformance(libraries, seed=seed, progress=show)]
