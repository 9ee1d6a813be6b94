"""Running: workers of attacks, and the blocks of runs worked on, verified, stored, counted and shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from robust_ext.core.errors import InvalidArgumentError, OutOfTimeError, RobustExtError, RunFolderError
from robust_ext.core.machine import on_free_cores
from robust_ext.engine.context import ISOLATING, current_context, is_over, set_aside
from robust_ext.engine.estimate import EstimatedError, estimate_runs
from robust_ext.engine.evaluation_file import as_folder, claim, plan, read_evaluation, write_evaluation
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.identity import versions
from robust_ext.engine.isolation.worker import CAN_ISOLATE, IsolatedWorker, isolating
from robust_ext.engine.pool import Pool, current_pool, pooling
from robust_ext.engine.progress import Progress, phase, showing
from robust_ext.engine.run import Outcome, Run, end, finish, keep, tell, timed
from robust_ext.engine.run_folder import RunFolder
from robust_ext.engine.sharing import run_on
from robust_ext.engine.store import Store
from robust_ext.engine.task import Task, TaskResult, Worker, run_task, verified


@contextmanager
def attack_worker(
    *,
    isolate: bool,
    attack_timeout: float | None = None,
    executor: ExecutorLike = None,
    devices: Sequence[str] | None = None,
) -> Iterator[Worker]:
    """The worker that runs attacks inside the block: in this process, or each in one of its own.

    With an executor, runs inside the block find a pool that has such a worker in each of its processes. Inside another
    such block it is that block's worker, and its pool where there is no other.

    Args:
        isolate: Whether attacks get processes of their own.
        attack_timeout: Seconds that an attack may take for a batch, above 0; None for any time.
        executor: What runs blocks, see :class:`Pool`; None for this process.
        devices: The devices that its workers use, one a block at a time; ``executor`` is then ``"local"`` by default.

    Raises:
        InvalidArgumentError: There is a timeout without isolation, this system cannot fork, or the executor is none.
    """
    if devices is not None and executor is None:
        executor = "local"
    with on_free_cores(), _attacking(isolate=isolate, attack_timeout=attack_timeout) as worker:
        if executor is None:
            yield worker
            return
        timeout = worker.timeout if isinstance(worker, IsolatedWorker) else None
        pool = Pool(executor, devices=devices, isolate=worker is not run_task, attack_timeout=timeout)
        with pooling(pool):
            yield worker


@contextmanager
def _attacking(*, isolate: bool, attack_timeout: float | None) -> Iterator[Worker]:
    current = ISOLATING.get()
    if current is not None:
        with current.evaluation():
            yield current
        return
    if not isolate:
        if attack_timeout is not None:
            expected = "None, or attacks in processes of their own (isolate=True), which alone can be stopped"
            raise InvalidArgumentError("attack_timeout", attack_timeout, expected)
        yield run_task
        return
    if not CAN_ISOLATE:
        raise InvalidArgumentError("isolate", True, "False on a system that has no process to fork others from")
    worker = IsolatedWorker(timeout=attack_timeout)
    with closing(worker), isolating(worker):
        yield worker


R = TypeVar("R", bound=Run)
Choice = Callable[[Sequence[R], Mapping[str, Outcome[R]]], R | None]
"""Of the runs that are left and the outcomes so far: which is next, and as what; None for none of them."""


def run_all(
    runs: Sequence[R],
    *,
    out: str | os.PathLike[str] | None,
    progress: bool,
    title: str,
    unit: str = "candidate",
    choose: Choice[R] | None = None,
    settings: Mapping[str, Any] | None = None,
    whole: bool = True,
) -> Generator[Task, TaskResult, dict[str, Outcome[R]]]:
    """The tasks of all runs that are not there yet, for :func:`robust_ext.engine.task.drive`.

    Inside :func:`robust_ext.engine.pool.pooling`, workers of the pool have those of blocks, and only what comes
    before these is left. ``unit`` is what progress counts. With ``choose`` runs follow one another, each chosen when
    the one before it is done; else workers share all of them. Returns outcomes by key, in the order of the runs, or
    that in which they were chosen.

    The folder takes one evaluation, see :func:`robust_ext.engine.evaluation_file.claim`: ``settings`` are those of the
    result next to its runs, and without ``whole`` the runs are part of an evaluation that has claimed the folder.
    """
    context, folder, pool = current_context(), as_folder(out), current_pool()
    workers = 1 if pool is None else pool.workers
    stated = dict[str, Any]()
    if folder is not None:
        holds = {key: name for run in runs for key, name in run.holds.items()}
        stated = claim(folder, title, holds=holds, settings=settings) if whole else read_evaluation(folder)
    if folder is not None:
        # Without a folder nothing is resumed, and nothing has to be told apart from an earlier run.
        runs = [replace(run, identity={**run.identity, **run.digests()}) for run in runs]
    if context.dry_run:
        raise EstimatedError(estimate_runs(runs, folder=folder, title=title, workers=workers))
    total = sum(len(rows) for run in runs for rows in run.blocks)
    if context.repair and folder is not None:
        for run in runs:
            if (folder / run.key).is_dir():
                _open(run, folder, repair=True).close()
    outcomes: dict[str, Outcome[R]] = {}

    def opened(run: R) -> Store:
        store = _open(run, folder)
        # Not before a folder has turned out to be that of this evaluation.
        if folder is not None and not outcomes:
            write_evaluation(folder, plan(stated, runs, title=title))
        return store

    with showing(title, shown=progress, total=total, unit=unit) as bar:
        left = list(runs)
        while group := _next_group(left, outcomes, choose):
            left = [run for run in left if all(run.key != one.key for one in group)]
            if pool is not None:
                outcomes |= yield from run_on(pool, group, opened, bar)
            for run in group if pool is None else ():
                with closing(opened(run)) as store:
                    outcomes[run.key] = yield from _run(run, store, bar)
    return outcomes if choose is not None else {run.key: outcomes[run.key] for run in runs}


def _next_group(left: Sequence[R], outcomes: Mapping[str, Outcome[R]], choose: Choice[R] | None) -> list[R]:
    """The runs that are worked on next, in order."""
    if choose is None:
        return sorted(left, key=lambda run: not run.long)
    chosen = choose(left, outcomes) if left else None
    return [] if chosen is None else [chosen]


def _open(run: Run, folder: Path | None, *, repair: bool = False) -> Store:
    if folder is None:
        return Store()
    path, samples = folder / run.key, sum(map(len, run.blocks))
    if Path(os.path.realpath(path)) != Path(os.path.realpath(folder)) / run.key:
        raise RunFolderError(f"{path}: leads out of {folder} by a symbolic link; choose another folder")
    return RunFolder(path, kind=run.kind, settings=run.stated, versions=versions(), samples=samples, repair=repair)


def _run(run: R, store: Store, bar: Progress | None) -> Generator[Task, TaskResult, Outcome[R]]:
    phase(run.title)
    try:
        with run.session():
            set_aside(run.common())
            yield from verified(run.prepare(store))
            for rows in run.blocks:
                if run.decided(store):
                    break
                kept = store.holds(rows)
                if not kept:
                    if run.partial and is_over():
                        raise OutOfTimeError("the time that was given is over")
                    keep((yield from timed(run.work(rows, run.needs(rows, store)))), store)
                tell(run, rows, store)
                if bar is not None:
                    bar.advance(len(rows), kept=kept)
    except RobustExtError as error:
        return end(run, store, error)
    return finish(run, store)
