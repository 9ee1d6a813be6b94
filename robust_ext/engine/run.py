"""The engine: every evaluation is a list of runs, and a run is blocks of samples whose tasks come from a generator.

An evaluation's protocol subclasses :class:`Run`. Here its blocks are run, verified, stored, resumed, shared between
processes, counted and shown; what came back is an :class:`Outcome` for each run.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from robust_ext.core.cost import Cost, Spent
from robust_ext.core.counted import STREAMS
from robust_ext.core.errors import AttackError, InvalidArgumentError, OutOfTimeError, RobustExtError, RunFolderBusyError
from robust_ext.core.speed import Probe
from robust_ext.engine.context import ISOLATED, RunContext, current_context
from robust_ext.engine.forecast import Forecast, make_forecast
from robust_ext.engine.identity import versions
from robust_ext.engine.phases import Speedometer, phases_of
from robust_ext.engine.progress import Progress, is_shown, phase, showing
from robust_ext.engine.run_folder import RunFolder
from robust_ext.engine.shards import run_shards
from robust_ext.engine.store import Record, Store
from robust_ext.engine.task import Attempt, Task, TaskResult, Work, verified

logger = logging.getLogger(__name__)

# How long to wait for another process to finish a run before looking again.
_PATIENCE = 0.5
# Seconds from which on an estimate is stated before the work.
_LONG = 300.0

R = TypeVar("R", bound="Run")
R_co = TypeVar("R_co", bound="Run", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Block:
    """What is kept of a block of samples."""

    records: Sequence[Record]  # One a sample, each with its index
    timing: Record  # What they took; plain values
    candidates: Tensor | None = None  # Verified candidates (n, ...), where they are needed later

    @staticmethod
    def of(rows: range, ids: Sequence[int], attempt: Attempt, candidates: Tensor, **columns: Sequence[Any]) -> Block:
        """The block of one attempt on these rows: id, outcome and these columns of each."""
        more = {} if attempt.error is None else {"error": attempt.error}
        traces = [None] * len(rows) if attempt.trace is None else attempt.trace.rows()
        records = [
            {
                "index": row,
                "sample": ids[row],
                "outcome": outcome,
                **{name: of[n] for name, of in columns.items()},
                "trace": traces[n],
                **more,
            }
            for n, (row, outcome) in enumerate(zip(rows, attempt.verified.outcomes, strict=True))
        ]
        curve = [] if attempt.trace is None else list(attempt.trace.curve)
        timing = {"block": rows[0], "phases": attempt.spent, "curve": curve}
        return Block(records=records, timing=timing, candidates=candidates)


@dataclass(frozen=True, kw_only=True)
class Run(ABC):
    """The work of one store."""

    kind: ClassVar[str] = "attack"  # Of the run, in its folder
    shared: ClassVar[bool] = False  # Whether processes share its blocks; otherwise each process takes whole runs
    partial: ClassVar[bool] = False  # Whether its first blocks are a result where the time is over before the others

    key: str  # Its folder inside the run folder; empty for the run folder itself
    title: str  # In words
    blocks: Sequence[range]  # Indices of the samples that are worked on together
    identity: Mapping[str, Any]  # Everything the records depend on; plain values
    # Whether it takes longer than others; such are begun first, so that no process is left with one at last
    long: bool = False

    def session(self) -> AbstractContextManager[object]:
        """What surrounds all of its work."""
        return nullcontext()

    def cost(self) -> Cost:
        """What one of its samples takes, on the average and at most."""
        return Cost(unknown=(self.title,))

    def probe(self) -> Probe | None:
        """The network whose rows are counted, to measure its speed with."""
        return None

    def prepare(self, store: Store) -> Work[None]:
        """Tasks that come before the blocks."""
        yield from ()

    @abstractmethod
    def work(self, rows: range, store: Store) -> Work[Block]:
        """The tasks of one block, and what is kept of it."""

    def decided(self, store: Store) -> bool:
        """Whether no further block is needed."""
        return False

    def tolerates(self, error: RobustExtError) -> bool:
        """Whether such an error is for the report, not the end of the evaluation."""
        return False

    def finish(self, store: Store) -> tuple[Sequence[Record], Sequence[Record]]:
        """Records and timings that count, once all blocks are done."""
        return store.records(), store.timings()


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[R_co]):
    """What a run left."""

    run: R_co
    store: Store
    records: Sequence[Record] = field(default=())  # One a sample
    timings: Sequence[Record] = field(default=())  # One a block
    refusal: str | None = None  # Why it could not be run; the rest is then empty
    cut: bool = False  # Whether the time was over before its blocks were done

    def spent(self, phase: str) -> Spent:
        """What a phase took, over all blocks."""
        return Spent.total(timing["phases"][phase] for timing in self.timings)


def isolated(outcomes: Iterable[Outcome[Any]]) -> bool:
    """Whether every attack ran in a process of its own."""
    return all(timing.get("isolated", False) for one in outcomes for timing in one.timings)


def run_all(
    runs: Sequence[R], *, out: str | os.PathLike[str] | None, progress: bool, title: str, unit: str = "candidate"
) -> Generator[Task, TaskResult, dict[str, Outcome[R]] | None]:
    """The tasks of all runs that are not there yet, for :func:`robust_ext.engine.task.drive`.

    ``unit`` is what progress counts. Returns outcomes by key, in the order of the runs; None in one of several
    processes, which leaves the result to others.
    """
    context, folder = current_context(), None if out is None else Path(out)
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
                    with run.session():
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
        settings={**run.identity, "streams": STREAMS},
        versions=versions(),
        shard=context.shard[0] if run.shared else 0,
        repair=repair,
    )


def timed(work: Work[Block], speed: Speedometer) -> Generator[Task, TaskResult, Block]:
    """The tasks of a block, whose timing gets its seconds in all, and those of bare passes in the same process."""
    begun = time.perf_counter()
    block = yield from verified(work)
    seconds = time.perf_counter() - begun
    counted = Spent.total(spent for *_, spent in phases_of(block.timing, ""))
    more = {"seconds": seconds, "speed": speed.after(counted._replace(seconds=seconds))}
    return replace(block, timing={**block.timing, **more})


def _run(
    run: R, store: Store, context: RunContext, speed: Speedometer, bar: Progress | None
) -> Generator[Task, TaskResult, Outcome[R]]:
    number, count = context.shard if run.shared else (0, 1)
    forecast = Forecast() if bar is None else bar.forecast
    phase(run.title)
    cut = False
    try:
        yield from verified(run.prepare(store))
        for rows in run.blocks[number::count]:
            if count > 1:
                store.refresh()
            if run.decided(store):
                break
            if not store.holds(rows):
                forecast.begin(run.key, len(rows))
                block = yield from timed(run.work(rows, store), speed)
                if block.candidates is not None:
                    # Before the records: a block whose records are there is not run again.
                    kept = block.candidates.detach().cpu().numpy()
                    store.save(candidates_name(rows[0]), candidates=kept)
                store.append(block.records, {**block.timing, "isolated": ISOLATED.get()})
            if context.on_record is not None and context.shard[1] == 1:
                for record in store.block(rows):
                    context.on_record({"run": run.title, **record})
            forecast.end(run.key, len(rows))
            if bar is not None:
                bar.advance(len(rows))
    except OutOfTimeError:
        if not run.partial:
            raise
        cut = True
    except RobustExtError as error:
        if not run.tolerates(error):
            raise
        logger.warning("%s", error)
        return Outcome(run=run, store=store, refusal=str(error))
    finally:
        forecast.drop(run.key)
    final, timings = run.finish(store)
    return Outcome(run=run, store=store, records=final, timings=timings, cut=cut)


def check_some_ran(attacked: Sequence[Outcome[Any]]) -> None:
    """Raise AttackError where every attack was refused: there is no worst case over none."""
    reasons = dict.fromkeys(one.refusal for one in attacked if one.refusal is not None)
    if attacked and all(one.refusal is not None for one in attacked):
        raise AttackError(f"no attack was run, so nothing can be stated: {'; '.join(map(str, reasons))}")


def candidates_name(start: int) -> str:
    """The name under which the candidates of the block that begins at this index are kept."""
    return f"candidates-{start:06d}"
