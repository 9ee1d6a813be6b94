"""``robust-ext run``."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from robust_ext.cli.study import check_reach, read_study, study_arguments
from robust_ext.core.errors import InvalidArgumentError, RobustExtError
from robust_ext.core.objects import refusing_code


def run_study(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="A table called as a command, with its options.")],
    out: Annotated[Path | None, typer.Option(help="Run folder, in place of the study's.")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Do again what is damaged in the run folder.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check it, and print what it would cost; nothing is run or written.")
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Let the study name code (file.py:object, package.module:object) or a cluster, and write anywhere.",
        ),
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Run the command that a TOML file holds; every result is printed with the study that repeats it."""
    group: Any = context.parent and context.parent.command
    commands = {name: one for name, one in group.commands.items() if name != context.info_name}
    study = read_study(file, commands)
    command = commands[study.command]
    known = {parameter.name for parameter in command.params}
    over = {"out": out, "repair": repair or None, "dry-run": dry_run or None, "progress": None if progress else False}
    for key, value in over.items():
        if value is not None and key.replace("-", "_") not in known:
            raise InvalidArgumentError(f"--{key}", str(value), f"no such option for {study.command}, which has none")
    own = {key: value for key, value in study.options.items() if over.get(key) is None}
    if not allow_code:
        check_reach(replace(study, options=own), file)
    options = {**own, **{key: value for key, value in over.items() if value is not None}}
    arguments = study_arguments(replace(study, options=options), command.params)
    with nullcontext() if allow_code else refusing_code():
        try:
            with command.make_context(study.command, arguments, parent=context.parent) as inner:
                command.invoke(inner)
        except InvalidArgumentError as error:
            argument = error.argument.removeprefix("--")
            raise InvalidArgumentError(f"{file}: [{study.command}] {argument}", error.got, error.expected) from error
        except Exception as error:
            # Usage errors have other classes in every release of typer and click.
            if not hasattr(error, "format_message"):
                raise
            text = re.sub(r"--([\w-]+)", r"\1", error.format_message())
            raise RobustExtError(f"{file}: [{study.command}] {text}") from error
