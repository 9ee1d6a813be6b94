"""Runs side by side on a pool, until all blocks are done that can be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from robust_ext.core.cost import Spent
from robust_ext.core.errors import OutOfTimeError, RobustExtError
from robust_ext.engine.context import current_context
from robust_ext.engine.phases import phases_of
from robust_ext.engine.pool.lane import Lane
from robust_ext.engine.pool.packing import Packing
from robust_ext.engine.pool.pool import Job, Pool
from robust_ext.engine.progress import Progress, phase
from robust_ext.engine.run import Outcome, Run
from robust_ext.engine.store import Store
from robust_ext.engine.task import Task, TaskResult, verified

# Seconds between two looks at what is shown.
_SHOWN = 0.5
# Blocks that an error lists.
_LISTED = 20

R = TypeVar("R", bound=Run)


def run_on(
    pool: Pool, runs: Sequence[R], opened: Callable[[R], Store], bar: Progress | None
) -> Generator[Task, TaskResult, dict[str, Outcome[R]]]:
    """Have a pool do what is missing of runs, in order; outcomes by key.

    What comes before the blocks of a run is done here: its tasks are those of this generator. RobustExtError where
    blocks end their workers, once all others are kept.
    """
    waiting, lanes, untold, packing = deque(runs), list[Lane[R]](), deque[Lane[R]](), Packing()
    active: list[Lane[R]] = []
    try:
        while waiting or active:
            while pool.room > 0:
                job = next((one for lane in active if (one := _next_job(lane, pool)) is not None), None)
                if job is not None:
                    pool.submit(job)
                elif waiting:
                    lane = yield from _begun(waiting.popleft(), opened, packing)
                    for group in (lanes, untold, active):
                        group.append(lane)
                    _settle([lane], bar)
                else:
                    break
            for job in pool.wait(_patience(bar)) if pool.busy else ():
                lane, index = job.place
                lane.take(index, job)
                _count(lane.run, index, job, bar)
            deadline = current_context().deadline
            if deadline is not None and time.monotonic() >= deadline:
                for lane in active:
                    lane.fail(OutOfTimeError("the time that was given is over"))
            _settle(active, bar)
            active = [lane for lane in active if not lane.closed]
            while untold and untold[0].tell():
                untold.popleft()
    finally:
        for lane in lanes:
            lane.store.close()
    _check_lost(lanes)
    return {lane.run.key: lane.outcome for lane in lanes if lane.outcome is not None}


def _begun(run: R, opened: Callable[[R], Store], packing: Packing) -> Generator[Task, TaskResult, Lane[R]]:
    """A run whose store is open, and what comes before its blocks done."""
    phase(run.title)
    lane = Lane(run, opened(run))
    try:
        with run.session():
            yield from verified(run.prepare(lane.store))
        lane.pack(packing)
    except RobustExtError as refused:
        lane.fail(refused)
    except BaseException:
        lane.store.close()
        raise
    return lane


def _next_job(lane: Lane[Any], pool: Pool) -> Job | None:
    index = None if lane.closed else lane.next(ahead=pool.workers + 1)
    return None if index is None else lane.job(index, pool)


def _patience(bar: Progress | None) -> float | None:
    """Seconds to wait for a job at most."""
    deadline = current_context().deadline
    seconds = [] if deadline is None else [max(0.0, deadline - time.monotonic())]
    return min([*seconds, *([] if bar is None else [_SHOWN])], default=None)


def _settle(lanes: Sequence[Lane[Any]], bar: Progress | None) -> None:
    for lane in lanes:
        for rows in lane.settle():
            if bar is not None:
                bar.advance(len(rows))
        if lane.closed and bar is not None:
            bar.forecast.drop(lane.run.key)
    if bar is not None:
        bar.advance(0)


def _count(run: Run, index: int, job: Job, bar: Progress | None) -> None:
    """Count what a block took on its worker."""
    if bar is not None and job.reply is not None and "timing" in job.reply:
        timing = job.reply["timing"]
        spent = Spent.total(spent for *_, spent in phases_of(timing, ""))
        bar.forecast.count(spent.forward, spent.backward)
        bar.forecast.took(run.key, len(run.blocks[index]), timing["seconds"])


def _check_lost(lanes: Sequence[Lane[Any]]) -> None:
    """Raise RobustExtError where blocks could not be done."""
    lost = [(lane.run, lane.run.blocks[index], text) for lane in lanes for index, text in sorted(lane.lost.items())]
    if lost:
        samples = "; ".join(
            f"{run.title or run.kind}, samples {rows[0]} to {rows[-1]} ({text})" for run, rows, text in lost[:_LISTED]
        )
        raise RobustExtError(
            f"executor: {len(lost)} blocks ended their worker when they ran alone: {samples}; all others are done, "
            "and kept where there is a run folder; the same call tries these again, which a smaller batch_size may help"
        )
