"""What blocks of samples took by phase, in rows through the network and seconds; and how fast bare passes are."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from robust_ext.core.cost import Cost, Rates, Spent
from robust_ext.core.speed import BarePasses, Probe
from robust_ext.core.target import PassCounter

# Of the time that blocks take, how much bare passes are timed for, and the most seconds; more of the first ones.
_SHARE, _MOST = 0.01, 1.0
_SHARE_AT_FIRST, _MOST_AT_FIRST = 0.05, 0.02
# What a row costs that goes forward, and one that goes forward alone, and forward and back; each twice.
_FORWARD, _BOTH = 2, 8


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
        self._took: dict[tuple[int, bool], tuple[int, float]] = {}  # Rows that were timed at once, seconds of each
        if probe is not None:
            self._bare = BarePasses(probe.network, probe.inputs)
            forward = ((rows, False) for rows in probe.batches.values())
            self._sizes.extend(dict.fromkeys([(probe.batch, True), *forward]))

    def after(self, block: Spent) -> list[list[float | None]]:
        """What was timed after a block that took so much: batch size, rows timed, seconds a row forward, and back.

        The last is None where no gradients were.
        """
        self._worked += block.seconds
        found: list[list[float | None]] = []
        while self._sizes:
            size, backward = key = self._sizes[0]
            begun = time.perf_counter()
            # More than a bare pass takes, until one was timed: so that the share is kept.
            one = block.seconds / max(block.forward + 2 * block.backward, 1) * (_BOTH if backward else _FORWARD)
            least, one = self._took.get(key, (1, one))
            left = self._budget - self._spent
            rows = min(size, int(left / max(one, 1e-9)))
            if key in self._took and (left <= 0 or rows < least):
                break
            rows = max(rows, 1)
            rates = self._bare.measure(rows, backward=backward, warm=True)
            if rates is None:
                self._sizes.clear()
                break
            found.append([size, rows, rates.forward, rates.backward if backward else None])
            taken = time.perf_counter() - begun
            self._took[key] = rows, taken / rows
            self._spent += taken
            self._sizes.rotate(-1)
        return found

    @property
    def _budget(self) -> float:
        first = min(_SHARE_AT_FIRST * self._worked, _MOST_AT_FIRST)
        return min(max(_SHARE * self._worked, first), _MOST)


def phases_of(timing: Mapping[str, Any], title: str) -> Iterator[tuple[str, str | None, Spent]]:
    """The phases of a block's timing, attacks with their names, which is ``title`` where there is one."""
    for phase, spent in timing.get("phases", {}).items():
        yield phase, title if phase == "attack" else None, Spent(*spent)
    for name, own in timing.get("attacks", {}).items():
        yield from phases_of(own, name)


class Pace:
    """Seconds that the rows of each phase take as bare passes, from what :class:`Speedometer` timed."""

    def __init__(self, probe: Probe, entries: Sequence[Sequence[Any]]) -> None:
        self._probe = probe
        by_size: defaultdict[tuple[int, bool], list[Sequence[Any]]] = defaultdict(list)
        for entry in entries:
            by_size[entry[0], entry[3] is not None].append(entry)
        self._rates = {}
        for key, several in by_size.items():
            # Few rows at once show little of what a whole batch takes; runs of a moment have time for no more.
            most = [entry for entry in several if 2 * entry[1] >= key[0]]
            if most:
                # The fastest: others waited for other processes.
                forward, both = min(one[2] for one in most), min(one[2] + (one[3] or 0.0) for one in most)
                self._rates[key] = Rates(forward, max(both - forward, 0.0))

    def seconds(self, phase: str, cost: Cost) -> float | None:
        """What the rows of a phase take; None where there are none, or nothing was timed."""
        usual = self._rates.get((self._probe.batch, True))
        rows = None if cost.backward else self._probe.batches.get(phase)
        rates = usual if rows is None else self._rates.get((rows, False), usual)
        return None if rates is None or not (cost.forward or cost.backward) else rates.seconds(cost)


def measure_pace(probe: Probe) -> Pace:
    """The pace of a network that nothing was run through yet, in a quarter of a second, or some passes if longer."""
    return Pace(probe, Speedometer(probe).after(Spent(10**9, 0, 0.25 / _SHARE)))
