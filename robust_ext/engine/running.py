"""Running: the blocks of runs are worked on, here or by a pool, verified, stored, counted and shown."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from torch import nn

from robust_ext.core.errors import InvalidArgumentError, RobustExtError, RunFolderBusyError
from robust_ext.engine.context import RunContext, current_context
from robust_ext.engine.estimate import EstimatedError, estimate_runs
from robust_ext.engine.forecast import Forecast, make_forecast
from robust_ext.engine.identity import versions
from robust_ext.engine.phases import Speedometer
from robust_ext.engine.pool.lanes import run_on
from robust_ext.engine.pool.pool import current_pool
from robust_ext.engine.progress import Progress, is_shown, phase, showing
from robust_ext.engine.run import Outcome, Run, end, finish, keep, tell, timed
from robust_ext.engine.run_folder import RunFolder
from robust_ext.engine.shards import run_shards
from robust_ext.engine.store import Store
from robust_ext.engine.task import Task, TaskResult, verified

logger = logging.getLogger(__name__)

# How long to wait for another process to finish a run before looking again.
_PATIENCE = 0.5
# Seconds from which on an estimate is stated before the work.
_LONG = 300.0

R = TypeVar("R", bound=Run)


def run_all(
    runs: Sequence[R], *, out: str | os.PathLike[str] | None, progress: bool, title: str, unit: str = "candidate"
) -> Generator[Task, TaskResult, dict[str, Outcome[R]] | None]:
    """The tasks of all runs that are not there yet, for :func:`robust_ext.engine.task.drive`.

    ``unit`` is what progress counts. Returns outcomes by key, in the order of the runs; None in one of several
    processes, which leaves the result to others.
    """
    context, folder = current_context(), None if out is None else Path(out)
    if context.dry_run:
        pool = current_pool()
        workers = 1 if pool is None else pool.workers
        raise EstimatedError(estimate_runs(runs, folder=folder, title=title, workers=workers))
    estimated = is_shown(progress) or logger.isEnabledFor(logging.INFO)
    forecast = make_forecast(runs) if estimated and context.shard[1] == 1 else Forecast()
    total = sum(len(rows) for run in runs for rows in run.blocks)
    if context.repair and folder is not None:
        for run in runs:
            if (folder / run.key).is_dir():
                _open(run, folder, context, repair=True).close()
    if context.jobs > 1:
        if folder is None:
            raise InvalidArgumentError("jobs", context.jobs, "a run folder (out) when there is more than one")
        folders = {folder / run.key for run in runs}
        shared = forecast.split(context.jobs)
        with showing(title, shown=progress, total=total, unit=unit, forecast=shared) as bar:
            _announce(shared, title, bar)
            run_shards(context.command, folders, jobs=context.jobs, total=total, bar=bar)
    alone = context.shard[1] == 1
    outcomes: dict[str, Outcome[R]] = {}
    speeds: dict[nn.Module | None, Speedometer] = {}
    shown = progress and alone and context.jobs == 1
    left = sorted(runs, key=lambda run: not run.long)
    with showing(title, shown=shown, total=total, unit=unit, forecast=forecast) as bar:
        if alone and context.jobs == 1:
            _announce(forecast, title, bar)
        pool = current_pool()
        if pool is not None:
            outcomes = yield from run_on(pool, left, lambda run: _open(run, folder, context), bar)
            left = []
        while left:
            busy: list[R] = []
            for run in left:
                try:
                    store = _open(run, folder, context)
                except RunFolderBusyError:
                    if run.shared:
                        raise
                    busy.append(run)
                    continue
                with closing(store):
                    # Before the session: what counts the rows of a network is no part of its copy.
                    probe = run.probe()
                    network = None if probe is None else probe.network
                    if network not in speeds:
                        speeds[network] = Speedometer(probe)
                    outcomes[run.key] = yield from _run(run, store, context, speeds[network], bar)
            if not alone:
                return None
            if len(busy) == len(left):
                time.sleep(_PATIENCE)
            left = busy
    return {run.key: outcomes[run.key] for run in runs}


def _announce(forecast: Forecast, title: str, bar: Progress | None) -> None:
    """State what is to be expected: in the log, and where that is long and something is shown, there."""
    logger.info("%s: %s", title, forecast)
    if bar is not None and (forecast.left()[0] or 0.0) > _LONG and not logger.isEnabledFor(logging.INFO):
        bar.write_line(f"{title}: {forecast}")


def _open(run: Run, folder: Path | None, context: RunContext, *, repair: bool = False) -> Store:
    if folder is None:
        return Store()
    return RunFolder(
        folder / run.key,
        kind=run.kind,
        settings=run.stated,
        versions=versions(),
        shard=context.shard[0] if run.shared else 0,
        repair=repair,
    )


def _run(
    run: R, store: Store, context: RunContext, speed: Speedometer, bar: Progress | None
) -> Generator[Task, TaskResult, Outcome[R]]:
    number, count = context.shard if run.shared else (0, 1)
    forecast = Forecast() if bar is None else bar.forecast
    phase(run.title)
    try:
        with run.session():
            yield from verified(run.prepare(store))
            for rows in run.blocks[number::count]:
                if count > 1:
                    store.refresh()
                if run.decided(store):
                    break
                if not store.holds(rows):
                    forecast.begin(run.key, len(rows))
                    keep((yield from timed(run.work(rows, run.needs(rows, store)), speed)), store)
                tell(run, rows, store)
                forecast.end(run.key, len(rows))
                if bar is not None:
                    bar.advance(len(rows))
    except RobustExtError as error:
        return end(run, store, error)
    finally:
        forecast.drop(run.key)
    return finish(run, store)
