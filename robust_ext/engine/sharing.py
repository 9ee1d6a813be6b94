"""Runs whose blocks workers share: this process decides which are needed, and stores them."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from robust_ext.core.cost import Spent
from robust_ext.core.errors import OutOfTimeError, RobustExtError, issue
from robust_ext.engine.context import current_context, is_over
from robust_ext.engine.isolation.messages import Packer, as_error
from robust_ext.engine.pool import Pool, Reply, value_of
from robust_ext.engine.progress import Progress, phase, phases_of
from robust_ext.engine.remote import make_call, run_block
from robust_ext.engine.run import Outcome, Run, end, finish, keep, tell
from robust_ext.engine.store import Store
from robust_ext.engine.task import Task, TaskResult, verified

# Rows of the samples that every worker has, as probes of the network.
_PROBES = 4
# Seconds between two looks at the deadline and at what is shown; blocks that an error lists.
_LOOK, _LISTED = 0.5, 20

R = TypeVar("R", bound=Run)


class _Shared(Generic[R]):
    """A run whose blocks workers share. Blocks before ``head`` are done with.

    Where blocks are ordered, those after ``head`` are submitted with what is known of their needs. One that came back
    counts once all before it do, and runs again where these changed its needs: the records are those of a run here.
    """

    def __init__(self, run: R, store: Store, bar: Progress | None) -> None:
        self.run, self.store, self.bar = run, store, bar
        self.outcome: Outcome[R] | None = None
        self.closed = False
        self.head = self.told = 0
        self.lost: dict[int, str] = {}
        self._missing = [index for index, rows in enumerate(run.blocks) if not store.holds(rows)]
        self._kept = set(range(len(run.blocks))).difference(self._missing)
        self._flying: dict[int, Mapping[str, Any]] = {}  # Needs of the blocks that workers have, by index
        self._back: dict[int, tuple[Mapping[str, Any], Reply]] = {}  # Needs of an ordered block, and their outcome

    def begin(self, packer: Packer) -> Generator[Task, TaskResult, None]:
        """Do what comes before the blocks, and make the parts that workers are sent."""
        phase(self.run.title)
        try:
            with self.run.session():
                yield from verified(self.run.prepare(self.store))
            for one in self.run.samples():
                packer.share(one, rows=_PROBES)
            for part in (*self.run.common(), self.run):
                packer.share(part)
        except RobustExtError as refused:
            self._close(end(self.run, self.store, refused))
        self.advance()

    def submit(self, pool: Pool, packer: Packer) -> bool:
        """Submit the next block; return whether there was one."""
        ahead = self.head + pool.workers + 1 if self.run.ordered else len(self.run.blocks)
        if self.closed or not self._missing or self._missing[0] >= ahead:
            return False
        index, deadline = self._missing.pop(0), current_context().deadline
        rows = self.run.blocks[index]
        needs = self.run.needs(rows, self.store)
        call = make_call(
            packer,
            run_block,
            origin=self.run.place().type,
            run=self.run,
            rows=rows,
            needs=needs,
            isolate=pool.isolate,
            attack_timeout=pool.attack_timeout,
            seconds=None if deadline is None else deadline - time.monotonic(),
        )
        pool.submit((self, index), call, packer.parts)
        self._flying[index] = _plain(needs)
        return True

    def take(self, index: int, reply: Reply) -> None:
        """Store the block that came back, or set it aside until those before it are stored."""
        needs = self._flying.pop(index)
        if self.closed:
            return
        if "lost" in reply:
            self.lost[index] = reply["lost"]
        elif self.run.ordered:
            self._back[index] = needs, reply
        else:
            self._store(reply)

    def advance(self) -> None:
        """Go past the blocks that are done with, and close the run where no more are needed."""
        blocks, ordered, before = self.run.blocks, self.run.ordered, self.head
        if not self.closed and is_over():
            self._close(end(self.run, self.store, OutOfTimeError("the time that was given is over")))
        while not self.closed and self.head < len(blocks):
            rows = blocks[self.head]
            if ordered and self.run.decided(self.store):
                self._close(finish(self.run, self.store))
            elif self.store.holds(rows) or (self.head in self.lost and not ordered):
                self.head += 1
            elif self.head not in self._back:
                break
            else:
                needs, reply = self._back.pop(self.head)
                if needs != _plain(self.run.needs(rows, self.store)):
                    self._missing.insert(0, self.head)
                    break
                self._store(reply)
        stuck = ordered and self.lost and not self._flying and self.head not in self._missing
        if not self.closed and (stuck or self.head == len(blocks)):
            self._close(None if self.lost else finish(self.run, self.store))
        if self.bar is not None:
            for index in range(before, self.head):
                self.bar.advance(len(blocks[index]), kept=index in self._kept)

    def tell(self) -> bool:
        """Call back with the records of blocks that are done with; return whether no more are to come."""
        for index in range(self.told, self.head):
            if index not in self.lost:
                tell(self.run, self.run.blocks[index], self.store)
        self.told = self.head
        return self.closed

    def _store(self, reply: Reply) -> None:
        if "error" in reply:
            issue(reply["warnings"])
            self._close(end(self.run, self.store, as_error(reply)))
            return
        block = value_of(reply, self.run.title or self.run.kind)
        keep(block, self.store)
        if self.bar is not None:
            spent = Spent.total(spent for *_, spent in phases_of(block.timing, ""))
            self.bar.count(spent.forward, spent.backward)

    def _close(self, outcome: Outcome[R] | None) -> None:
        self.outcome, self.closed = outcome, True
        self.store.close()


def _plain(needs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what earlier blocks decided of what a block needs, as it is now."""
    return {name: copy.deepcopy(value) for name, value in needs.items() if not isinstance(value, Tensor)}


def run_on(
    pool: Pool, runs: Sequence[R], opened: Callable[[R], Store], bar: Progress | None
) -> Generator[Task, TaskResult, dict[str, Outcome[R]]]:
    """Run the missing blocks of runs on a pool, in order; return outcomes by key.

    What comes before the blocks of a run is done here: its tasks are those of this generator. RobustExtError where
    blocks are lost, once all others are kept.
    """
    waiting, shared, told, packer = deque(runs), list[_Shared[R]](), 0, Packer("a worker")
    try:
        while waiting or any(not one.closed for one in shared):
            while pool.room > 0:
                if any(one.submit(pool, packer) for one in shared):
                    continue
                if not waiting:
                    break
                run = waiting.popleft()
                shared.append(_Shared(run, opened(run), bar))
                yield from shared[-1].begin(packer)
            for (one, index), reply in pool.wait(_LOOK):
                one.take(index, reply)
            for one in shared:
                if not one.closed:
                    one.advance()
            while told < len(shared) and shared[told].tell():
                told += 1
    finally:
        for one in shared:
            one.store.close()
    lost = [(one.run, one.run.blocks[index], text) for one in shared for index, text in sorted(one.lost.items())]
    if lost:
        samples = "; ".join(
            f"{run.title or run.kind}, samples {rows[0]} to {rows[-1]} ({text})" for run, rows, text in lost[:_LISTED]
        )
        raise RobustExtError(
            f"executor: {len(lost)} blocks ended their worker when they ran alone: {samples}; all others are done, "
            "and kept where there is a run folder; the same call tries these again, which a smaller batch_size may help"
        )
    return {one.run.key: one.outcome for one in shared if one.outcome is not None}
