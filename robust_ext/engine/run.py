"""Runs: every evaluation is a list of them, and a run is blocks of samples whose tasks come from a generator.

An evaluation's protocol subclasses :class:`Run`; :mod:`robust_ext.engine.running` has its blocks run, and makes an
:class:`Outcome` of each run.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from robust_ext.core.cost import Cost, Costs, Spent
from robust_ext.core.errors import AttackError, OutOfTimeError, RobustExtError, collecting, issue, warn
from robust_ext.core.random import STREAMS
from robust_ext.engine.context import ISOLATING, current_context
from robust_ext.engine.store import Record, Store
from robust_ext.engine.task import Attempt, Task, TaskResult, Work, verified

RECORD = 700
"""Bytes of a record of one attempt, about."""

Probe = tuple[nn.Module, Tensor, int]
R = TypeVar("R", bound="Run")
R_co = TypeVar("R_co", bound="Run", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Block:
    """The stored results of a block of samples."""

    records: Sequence[Record]  # One a sample, each with its index; none of those that the timing marks as left_out
    timing: Record  # What they took; plain values
    arrays: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # What is kept next to them, by name

    @staticmethod
    def of(
        rows: Sequence[int], ids: Sequence[int], attempt: Attempt, candidates: Tensor, **columns: Sequence[Any]
    ) -> Block:
        """The block of one attempt on these rows: id, outcome, distance and these columns of each; keeps candidates."""
        more = {} if attempt.error is None else {"error": attempt.error}
        distances = [value if math.isfinite(value) else None for value in attempt.verified.distances.tolist()]
        traces = [None] * len(rows) if attempt.trace is None else attempt.trace.rows()
        records = [
            {
                "index": row,
                "sample": ids[row],
                "outcome": outcome,
                "distance": distances[n],
                **{name: of[n] for name, of in columns.items()},
                "trace": traces[n],
                **more,
            }
            for n, (row, outcome) in enumerate(zip(rows, attempt.verified.outcomes, strict=True))
        ]
        curve = [] if attempt.trace is None else list(attempt.trace.curve)
        timing = {"block": rows[0], "phases": attempt.spent, "curve": curve}
        arrays = {candidates_name(rows[0]): {"candidates": candidates.detach().cpu().numpy()}}
        return Block(records=records, timing=timing, arrays=arrays)


@dataclass(frozen=True, kw_only=True)
class Run(ABC):
    """The work of one store."""

    kind: ClassVar[str] = "run"  # The contents of records, for its folder
    partial: ClassVar[bool] = False  # Whether its first blocks are a result where the time is over before the others

    key: str  # Its folder inside the run folder; empty for the run folder itself
    title: str  # In words
    blocks: Sequence[range]  # Indices of the samples that are worked on together
    identity: Mapping[str, Any]  # Everything the records depend on; plain values
    # Whether it takes longer than others; such are begun first, so that no process is left with one at last
    long: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # Values computed from these are recomputed where needed.
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @property
    def ordered(self) -> bool:
        """True if what a block needs, or whether it is needed, follows from the blocks before it."""
        return False

    def place(self) -> torch.device:
        """The device that it lies on."""
        return torch.device("cpu")

    def common(self) -> Sequence[object]:
        """Objects that other runs have too; each may hold those before it, and travels once to each worker."""
        return ()

    def samples(self) -> Sequence[Tensor]:
        """Tensors of all samples ``(N, ...)``, of which workers elsewhere have the first few rows alone."""
        return ()

    def session(self) -> AbstractContextManager[object]:
        """Surround all of the run's work."""
        return nullcontext()

    def costs(self) -> Costs:
        """Return the cost of a sample, on average and at most, by phase."""
        return {("attack", self.title): Cost(unknown=(self.title,))}

    def cost(self) -> Cost:
        """Return the whole cost of a sample."""
        return sum(self.costs().values(), Cost())

    def digests(self) -> Mapping[str, Any]:
        """Return the digests for the folder besides the identity: networks, code, samples and behaviours."""
        return {}

    @property
    def holds(self) -> dict[str, str]:
        """The parts of a result that this run covers, by key, with titles."""
        return {self.key: self.title}

    @property
    def stated(self) -> dict[str, Any]:
        """Everything that its folder records about it."""
        return {**self.identity, "streams": STREAMS}

    def kept(self) -> int | None:
        """Bytes that a sample takes in a run folder, about; None where that is not known."""
        return None

    def probe(self) -> Probe | None:
        """The network whose rows are counted, with some inputs and the rows of a batch, to measure its speed with."""
        return None

    def prepare(self, store: Store) -> Work[None]:
        """Tasks that come before the blocks."""
        yield from ()

    def needs(self, rows: range, store: Store) -> Mapping[str, Any]:
        """Return a block's data besides the run: its rows of the samples, and results of earlier blocks.

        Tensors and plain values by name; where blocks are ordered, these values are all that earlier ones decide.
        """
        return {}

    @abstractmethod
    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
        """The tasks of one block, and what is kept of it; may run on another machine, on a copy of the run."""

    def decided(self, store: Store) -> bool:
        """Return whether no further block is needed."""
        return False

    def tolerates(self, error: RobustExtError) -> bool:
        """Return whether such an error is for the report, not the end of the evaluation."""
        return False

    def finish(self, store: Store) -> tuple[Sequence[Record], Sequence[Record]]:
        """Records and timings that count, once all blocks are done."""
        return store.records(), store.timings()


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[R_co]):
    """The outcome of a run."""

    run: R_co
    store: Store
    records: Sequence[Record] = field(default=())  # One a sample
    timings: Sequence[Record] = field(default=())  # One a block
    refusal: str | None = None  # Why it could not be run; the rest is then empty
    cut: bool = False  # Whether the time was over before its blocks were done

    def spent(self, phase: str) -> Spent:
        """Return the cost of a phase, over all blocks."""
        return Spent.total(timing["phases"][phase] for timing in self.timings)


def isolated(outcomes: Iterable[Outcome[Any]]) -> bool:
    """Return whether every attack ran in a process of its own."""
    return all(timing.get("isolated", False) for one in outcomes for timing in one.timings)


def timed(work: Work[Block]) -> Generator[Task, TaskResult, Block]:
    """The tasks of a block, whose timing gets its seconds in all and its warnings."""
    begun = time.perf_counter()
    warned: dict[str, bool] = {}
    try:
        with collecting() as warned:
            block = yield from verified(work)
    except Exception:
        issue(warned)
        raise
    more: dict[str, Any] = {"seconds": time.perf_counter() - begun}
    if warned:
        more["warnings"] = warned
    return replace(block, timing={**block.timing, **more})


def keep(block: Block, store: Store) -> None:
    """Store a block."""
    store.append(block.records, {**block.timing, "isolated": ISOLATING.get() is not None}, block.arrays)


def tell(run: Run, rows: range, store: Store) -> None:
    """Call back with the records of a block."""
    heard = current_context().on_record
    if heard is not None:
        for record in store.block(rows):
            heard({"run": run.title, **record})


def finish(run: R, store: Store, *, cut: bool = False) -> Outcome[R]:
    """Return the outcome of a run that is done, or ``cut`` off."""
    with run.session():
        records, timings = run.finish(store)
    for timing in timings:
        issue(timing.get("warnings", {}))
    return Outcome(run=run, store=store, records=records, timings=timings, cut=cut)


def end(run: R, store: Store, error: RobustExtError) -> Outcome[R]:
    """Return the outcome of a run that ended with an error; raises errors that are not for the report."""
    if isinstance(error, OutOfTimeError) and run.partial:
        return finish(run, store, cut=True)
    if isinstance(error, OutOfTimeError) or not run.tolerates(error):
        raise error
    warn(str(error), kept=False)
    return Outcome(run=run, store=store, refusal=str(error))


def check_some_ran(attacked: Sequence[Outcome[Any]]) -> None:
    """Raise AttackError where every attack was refused: there is no worst case over none."""
    reasons = dict.fromkeys(one.refusal for one in attacked if one.refusal is not None)
    if attacked and all(one.refusal is not None for one in attacked):
        raise AttackError(f"no attack was run, so nothing can be stated: {'; '.join(map(str, reasons))}")


def candidates_name(start: int) -> str:
    """The name under which the candidates of the block that begins at this index are kept."""
    return f"candidates-{start:06d}"
