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
from robust_ext.engine.context import current_context
from robust_ext.engine.evaluation_file import as_folder, read_evaluation, seed_of_runs, write_evaluation
from robust_ext.engine.run_folder import locked
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
    folder = as_folder(out)
    return dataclasses.replace(settings, judge_seed=fresh if folder is None else _seed_in(folder, fresh))


def _seed_in(folder: Path, fresh: int) -> int:
    """Return the seed that a folder states; where it states none, the fresh one, which it states from now on."""
    dry = current_context().dry_run
    if not dry:
        make_folder(folder, error=RunFolderError)
    with nullcontext() if dry else locked(folder):
        stated = read_evaluation(folder)
        seed = seed_of_runs(folder) if stated["judge_seed"] is None else stated["judge_seed"]
        seed = check_integer("judge_seed", fresh if seed is None else seed, minimum=0)
        # What belongs to an evaluation already, which may be another one, is left unchanged.
        if not dry and stated["evaluation"] is None:
            write_evaluation(folder, {**stated, "judge_seed": seed})
    return seed
