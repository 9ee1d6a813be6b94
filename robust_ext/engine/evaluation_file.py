"""``evaluation.json``: a folder's evaluation, the judge's seed, and the unfinished runs."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from robust_ext.core.errors import InvalidArgumentError, RunFolderError
from robust_ext.core.files import locked, make_folder, read_file, replace_file
from robust_ext.core.settings import LARGEST_SEED, Settings, setting, settings_class
from robust_ext.core.validation import check_integer
from robust_ext.engine.context import current_context
from robust_ext.engine.copies import differences
from robust_ext.engine.run_folder import EARLIER, RECORDS, SavedRun, damaged
from robust_ext.engine.schema import misfit
from robust_ext.engine.store import seal, to_text, unseal
from robust_ext.engine.task import Worker, run_task

if TYPE_CHECKING:
    from robust_ext.engine.run import Run


FILE = "evaluation.json"
_SHAPE = {
    "evaluation": (str, NoneType),
    "holds": {str: str},
    "settings": dict,
    "judge_seed": (int, NoneType),
    "planned": [{"key": str, "title": str, "samples": int, "evaluation": str}],
}


def as_folder(out: str | os.PathLike[str] | None) -> Path | None:
    """Return the run folder that a caller named, if any; InvalidArgumentError for an empty name or none."""
    if out is not None and (not isinstance(out, (str, os.PathLike)) or not os.fspath(out)):
        raise InvalidArgumentError("out", repr(out), "the name of a folder; '.' is the current one")
    return None if out is None else Path(out)


def read_evaluation(folder: Path) -> dict[str, Any]:
    """Return the declarations of a folder: ``evaluation``, ``holds``, ``settings``, ``judge_seed`` and ``planned``.

    A folder without declarations is new. RunFolderError where the file is damaged, unless the call repairs, or where an
    earlier version wrote the folder.
    """
    file = folder / FILE
    content = read_file(file, error=RunFolderError)
    if content is not None:
        try:
            found = unseal(content.removesuffix(b"\n"), "")
            if wrong := misfit(found, _SHAPE):
                raise ValueError(f"does not hold what it should ({wrong})")
            return found
        except ValueError as error:
            if not current_context().repair:
                raise damaged(file, str(error)) from error
    elif (folder / "judge.json").exists() or any(_files(folder, "run.json")):
        raise RunFolderError(f"{folder}: {EARLIER}")
    return {"evaluation": None, "holds": {}, "settings": {}, "judge_seed": None, "planned": []}


def write_evaluation(folder: Path, stated: Mapping[str, Any]) -> None:
    """Write the declarations of a folder, as :func:`read_evaluation` returns them."""
    replace_file(folder / FILE, seal(to_text(stated), ""), error=RunFolderError)


def claim(
    folder: Path, evaluation: str, *, holds: Mapping[str, str], settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a folder is to state once it takes an evaluation.

    ``holds`` is all that its result covers, by key, with a title. The same evaluation may be resumed and may cover
    more. Another one, or one that covers less, would replace a result without a word: RunFolderError.
    """
    stated = read_evaluation(folder)
    earlier = stated["evaluation"]
    if earlier is None and (folder / "result.json").exists() and not any(_files(folder, RECORDS)):
        raise RunFolderError(f"{folder}: holds a result.json without its records; choose another folder")
    if earlier not in (None, evaluation):
        raise RunFolderError(
            f"{folder}: holds an evaluation of kind {earlier!r}, not {evaluation!r}; choose another folder"
        )
    left_out = [title or evaluation for key, title in stated["holds"].items() if key not in holds]
    if left_out:
        names = f"{', '.join(left_out[:4])}{', ...' if len(left_out) > 4 else ''}"
        raise RunFolderError(
            f"{folder}: holds the result of {names}, which this call leaves out and would replace; choose another "
            "folder, or evaluate these as well"
        )
    now = dict(settings or {})
    if earlier is not None and (different := differences(stated["settings"], now)):
        raise RunFolderError(
            f"{folder}: holds an evaluation with other settings ({'; '.join(different)}); choose another folder, or go "
            "back to what it was begun with"
        )
    return {**stated, "evaluation": evaluation, "holds": dict(holds), "settings": now}


def begin_evaluation(
    folder: Path | None, evaluation: str, *, holds: Mapping[str, str], settings: Mapping[str, Any]
) -> None:
    """Claim a folder, if there is one, for an evaluation made of others, see :func:`claim`."""
    if folder is not None:
        stated = claim(folder, evaluation, holds=holds, settings=settings)
        if not current_context().dry_run:
            make_folder(folder, error=RunFolderError)
            write_evaluation(folder, stated)


def plan(stated: Mapping[str, Any], runs: Iterable[Run], *, title: str) -> dict[str, Any]:
    """Return the declarations of a folder once these runs are planned too, until :func:`close_evaluation`."""
    planned = {run["key"]: run for run in stated["planned"]}
    for run in runs:
        samples = sum(map(len, run.blocks))
        planned[run.key] = {"key": run.key, "title": run.title, "samples": samples, "evaluation": title}
    return {**stated, "planned": list(planned.values())}


def close_evaluation(folder: Path) -> None:
    """State that the runs of a folder are finished."""
    if (folder / FILE).exists():
        write_evaluation(folder, {**read_evaluation(folder), "planned": []})


def _files(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of this name in a run folder, as deep as evaluations make them."""
    for depth in range(4):
        yield from sorted(folder.glob("*/" * depth + name))


def seed_of_runs(folder: Path) -> int | None:
    """Return the judge's seed that the runs of a folder state; None where they state none."""
    for file in _files(folder, RECORDS):
        try:
            run = SavedRun(file.parent).run
        except RunFolderError:
            continue
        seed = None if run is None else run["settings"].get("judge_seed")
        if isinstance(seed, int):
            return seed
    return None


@settings_class
class JudgedSettings(Settings):
    """Settings of evaluations whose judge draws random numbers of its own."""

    seed: int = setting(default=0, help="Seed of all random draws.", minimum=0, maximum=LARGEST_SEED, panel="run")
    judge_seed: int | None = setting(
        default=None,
        help="Seed of the draws that an attack must not repeat: planted points, and those of random detectors and "
        "defenses that judge. Left out: ``seed`` where attacks run in this process; a new one, kept with the "
        "result, where they run in their own.",
        minimum=0,
        maximum=LARGEST_SEED,
        panel="run",
    )

    @property
    def seed_of_judge(self) -> int:
        """The seed of draws that an attack must not repeat."""
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
    """Return the seed of a folder; if it has none, store the fresh one and return it."""
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
