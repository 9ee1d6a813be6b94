"""One run on a pool: which block is submitted next, and what is kept of those that come back."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor

from robust_ext.core.errors import RobustExtError
from robust_ext.engine.context import current_context
from robust_ext.engine.isolation.messages import as_error
from robust_ext.engine.pool.packing import Packing, pack
from robust_ext.engine.pool.pool import Job, Pool
from robust_ext.engine.pool.remote import Call, run_block
from robust_ext.engine.run import Block, Outcome, Run, end, finish, keep, tell
from robust_ext.engine.store import Store

R = TypeVar("R", bound=Run)


class Lane(Generic[R]):
    """One run on its way.

    Blocks before ``head`` are done with. Where blocks are ordered, one that came back is kept when all before it are
    and did not change what it needed; otherwise it is run again, so that the records are those of a run here.
    """

    def __init__(self, run: R, store: Store) -> None:
        self.run, self.store = run, store
        self.outcome: Outcome[R] | None = None
        self.closed = False
        self.head = self._told = 0
        self.lost: dict[int, str] = {}
        self._next = 0  # The first block that was not submitted yet
        self._again: list[int] = []
        self._flying: set[int] = set()
        self._used: dict[int, Mapping[str, Any]] = {}  # What ordered blocks were given
        self._back: dict[int, Block] = {}
        self._error: tuple[int, RobustExtError] | None = None
        self._digests: tuple[str, ...] = ()
        self._parts: Mapping[str, bytes] = {}

    def pack(self, packing: Packing) -> None:
        """Make the parts that workers are sent."""
        samples = [packing.shorten(tensor) for tensor in self.run.samples()]
        self._digests = (*samples, *(packing.add(one) for one in self.run.common()), packing.add(self.run))
        self._parts = packing.parts

    def next(self, *, ahead: int) -> int | None:
        """The block to be submitted now; of ordered ones at most so many ahead of the first that is missing."""
        blocks = self.run.blocks
        end = len(blocks) if self._error is None else self._error[0]
        if self._again:
            return self._again.pop(0)
        while self._next < end and self.store.holds(blocks[self._next]):
            self._next += 1
        if self._next >= end or (self.run.ordered and (self.lost or self._next >= self.head + ahead)):
            return None
        self._next += 1
        return self._next - 1

    def job(self, index: int, pool: Pool) -> Job:
        """The call that runs a block."""
        rows, deadline = self.run.blocks[index], current_context().deadline
        needs = self.run.needs(rows, self.store)
        if self.run.ordered:
            self._used[index] = _plain(needs)
        self._flying.add(index)
        call = Call(
            parts=self._digests,
            rows=(rows.start, rows.stop),
            needs=pack(needs),
            isolate=pool.isolate,
            attack_timeout=pool.attack_timeout,
            seconds=None if deadline is None else deadline - time.monotonic(),
            origin=self.run.place().type,
        )
        return Job(function=run_block, call=call, parts=self._parts, place=(self, index))

    def take(self, index: int, job: Job) -> None:
        """Have what became of a block."""
        self._flying.discard(index)
        if self.closed:
            return
        if job.reply is None:
            self.lost[index] = str(job.lost)
        elif "raised" in job.reply:
            raise RobustExtError(f"{self.run.title or self.run.kind}: a worker raised\n{job.reply['raised']}")
        elif "error" in job.reply:
            self.fail(as_error(job.reply), index)
        else:
            block = Block(**{name: job.reply[name] for name in ("records", "timing", "arrays")})
            if self.run.ordered:
                self._back[index] = block
            else:
                keep(block, self.store)

    def fail(self, error: RobustExtError, index: int = -1) -> None:
        """Have an error of a block; that of the first one counts."""
        if self._error is None or index < self._error[0]:
            self._error = index, error

    def settle(self) -> Iterator[range]:
        """Keep what can be kept, and close where nothing more is to come; yields the blocks that are done with."""
        blocks, ordered = self.run.blocks, self.run.ordered
        while not self.closed and self.head < len(blocks):
            rows = blocks[self.head]
            if ordered and self.run.decided(self.store):
                self._close(finish(self.run, self.store))
            elif self.store.holds(rows) or (self._kept_next() if ordered else self.head in self.lost):
                self.head += 1
                yield rows
            else:
                break
        if self.closed:
            return
        before = len(blocks) if self._error is None else self._error[0]
        if any(index < before for index in (*self._flying, *self._again)):
            return
        if self.lost and (ordered or self.head == len(blocks)):
            self._close(None)
        elif self._error is not None:
            self._close(end(self.run, self.store, self._error[1]))
        elif self.head == len(blocks):
            self._close(finish(self.run, self.store))

    def tell(self) -> bool:
        """Call back with the records of the blocks that are done with; whether no more are to come."""
        for index in range(self._told, self.head):
            if index not in self.lost:
                tell(self.run, self.run.blocks[index], self.store)
        self._told = self.head
        return self.closed

    def _kept_next(self) -> bool:
        """Whether the first missing block came back and counts; it is run again where it needed something else."""
        block = self._back.pop(self.head, None)
        if block is None:
            return False
        if self._used[self.head] != _plain(self.run.needs(self.run.blocks[self.head], self.store)):
            self._again.append(self.head)
            return False
        keep(block, self.store)
        return True

    def _close(self, outcome: Outcome[R] | None) -> None:
        self.outcome, self.closed = outcome, True
        self.store.close()


def _plain(needs: Mapping[str, Any]) -> dict[str, Any]:
    """What earlier blocks decided of what a block needs, as it is now."""
    return {name: copy.deepcopy(value) for name, value in needs.items() if not isinstance(value, Tensor)}
