"""What an evaluation is going to run, in its run folder for as long as it is not finished."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_ext.core.errors import RunFolderError
from robust_ext.engine.archive import read_value, write_value

if TYPE_CHECKING:
    from robust_ext.engine.run import Run

PLAN = "plan.json"


def write_plan(folder: Path, runs: Sequence[Run], *, evaluation: str) -> None:
    """Add the runs of an evaluation to those that a folder states already; a damaged file is written anew."""
    planned: dict[str, dict[str, Any]] = {}
    with suppress(RunFolderError):
        planned = {run["key"]: run for run in read_plan(folder)}
    for run in runs:
        samples = sum(map(len, run.blocks))
        planned[run.key] = {"key": run.key, "title": run.title, "samples": samples, "evaluation": evaluation}
    write_value(folder / PLAN, "", list(planned.values()))


def read_plan(folder: Path) -> list[dict[str, Any]]:
    """The runs that are planned, each with ``key``, ``title``, ``samples`` and ``evaluation``.

    RunFolderError where the file is damaged or missing.
    """
    found: list[dict[str, Any]] = read_value(folder / PLAN, "")
    return found


def remove_plan(folder: Path) -> None:
    """State that the evaluation is finished."""
    (folder / PLAN).unlink(missing_ok=True)
