"""What blocks of samples took by phase, in rows through the network and seconds; and how fast bare passes are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from robust_ext.core.cost import Spent
from robust_ext.core.speed import BarePasses, Probe
from robust_ext.core.target import PassCounter

# Of the time that blocks take, how much bare passes are timed for; and for how many seconds at least and at most.
_SHARE, _LEAST, _MOST = 0.01, 0.01, 1.0
# What a row costs that goes forward, and one that goes forward alone, and forward and back.
_FORWARD, _BOTH = 1, 4


class Phases:
    """Phases that follow each other, each of which begins where the one before it ended."""

    def __init__(self, counter: PassCounter) -> None:
        self.spent: dict[str, Spent] = {}
        self._counter = counter
        self._begun, self._seen = time.perf_counter(), counter.snapshot()

    def stop(self, phase: str) -> None:
        """What was spent since the last call is that of this phase."""
        now, seen = time.perf_counter(), self._counter.snapshot()
        rows = seen.since(self._seen)
        more = Spent(rows.forward, rows.backward, now - self._begun)
        self.spent[phase] = Spent.total([self.spent.get(phase, Spent()), more])
        self._begun, self._seen = now, seen


class Speedometer:
    """Times bare passes between blocks, in the process that works on them, for a hundredth of their time."""

    def __init__(self, probe: Probe | None) -> None:
        self._worked = self._spent = 0.0
        self._sizes: deque[tuple[int, bool]] = deque()
        self._most: dict[tuple[int, bool], int] = {}  # Rows that were timed at once
        if probe is not None:
            self._bare = BarePasses(probe.network, probe.inputs)
            self._sizes.extend(
                dict.fromkeys([(probe.batch, True), *((rows, False) for rows in probe.batches.values())])
            )

    def after(self, block: Spent) -> list[list[float | None]]:
        """What was timed after a block that took so much: batch size, rows timed, seconds a row forward, and back.

        The last is None where no gradients were.
        """
        self._worked += block.seconds
        # More than a bare pass takes: what is timed stays below its share.
        row = block.seconds / max(block.forward + 2 * block.backward, 1)
        found: list[list[float | None]] = []
        while self._sizes:
            size, backward = key = self._sizes[0]
            begun = time.perf_counter()
            left = min(max(_SHARE * self._worked, _LEAST), _MOST) - self._spent
            rows = min(size, int(left / max(row * (_BOTH if backward else _FORWARD), 1e-9)))
            if rows < self._most.get(key, 0) or (rows < 1 and key in self._most):
                break
            rates = self._bare.measure(max(rows, 1), backward=backward)
            if rates is None:
                self._sizes.clear()
                break
            found.append([size, max(rows, 1), rates.forward, rates.backward if backward else None])
            self._most[key] = max(rows, 1)
            self._spent += time.perf_counter() - begun
            self._sizes.rotate(-1)
        return found


def phases_of(timing: Mapping[str, Any], title: str) -> Iterator[tuple[str, str | None, Spent]]:
    """The phases of a block's timing, attacks with their names, which is ``title`` where there is one."""
    for phase, spent in timing.get("phases", {}).items():
        yield phase, title if phase == "attack" else None, Spent(*spent)
    for name, own in timing.get("attacks", {}).items():
        yield from phases_of(own, name)
