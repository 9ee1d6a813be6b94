"""The seed of draws that an attack must not repeat."""

from __future__ import annotations

import dataclasses
import os
import secrets
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

from robust_ext.core.errors import RunFolderError
from robust_ext.core.files import make_folder
from robust_ext.core.settings import LARGEST_SEED, Settings, setting, settings_class
from robust_ext.core.validation import check_integer
from robust_ext.engine.archive import read_value, write_value
from robust_ext.engine.context import current_context
from robust_ext.engine.locks import locked
from robust_ext.engine.repair import read_run
from robust_ext.engine.task import Worker, run_task


@settings_class
class JudgedSettings(Settings):
    """Settings of evaluations whose judge draws random numbers of its own."""

    seed: int = setting(default=0, help="Of every draw.", minimum=0, maximum=LARGEST_SEED, panel="run")
    judge_seed: int | None = setting(
        default=None,
        help="Of the draws that an attack must not repeat: what is planted, and those of random detectors and defenses "
        "that judge. Left out: ``seed`` where attacks run in this process; drawn anew, and kept with the result, where "
        "they run in their own.",
        minimum=0,
        maximum=LARGEST_SEED,
        panel="run",
    )

    @property
    def seed_of_judge(self) -> int:
        """Of the draws that an attack must not repeat."""
        return self.seed if self.judge_seed is None else self.judge_seed


S = TypeVar("S", bound=JudgedSettings)


def with_judge_seed(settings: S, *, out: str | os.PathLike[str] | None, worker: Worker) -> S:
    """The settings with a judge's seed: theirs; else that of the run folder ``out``; else a new one, kept there.

    A new one is drawn from the operating system where attacks run in processes of their own, and is ``seed`` otherwise:
    in this process they could read it. RunFolderError where the folder's cannot be read or written.
    """
    if settings.judge_seed is not None:
        return settings
    fresh = settings.seed if worker is run_task else secrets.randbits(62)
    seed: int = fresh if out is None else _kept(Path(out), fresh)
    return dataclasses.replace(settings, judge_seed=seed)


def _kept(folder: Path, fresh: int) -> int:
    """The seed that a folder holds; where it holds none, that of its runs, or else the fresh one, from now on."""
    file, dry = folder / "judge.json", current_context().dry_run
    if not dry:
        make_folder(folder, error=RunFolderError)
    with nullcontext() if dry else locked(folder / ".lock-judge", wait=True):
        if file.exists():
            try:
                return check_integer("judge_seed", read_value(file, ""), minimum=0)
            except RunFolderError:
                if not current_context().repair:
                    raise
        of_runs = [seed for run in sorted(folder.rglob("run.json")) if (seed := _seed_of(run)) is not None]
        seed = of_runs[0] if of_runs else fresh
        return check_integer("judge_seed", seed if dry else write_value(file, "", seed), minimum=0)


def _seed_of(run: Path) -> object:
    try:
        return read_run(run)[0]["settings"].get("judge_seed")
    except RunFolderError:
        return None
