"""What blocks of samples took by phase, in rows through the network and seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from robust_ext.core.cost import Spent
from robust_ext.core.target import PassCounter


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


def phases_of(timing: Mapping[str, Any], title: str) -> Iterator[tuple[str, str | None, Spent]]:
    """The phases of a block's timing, attacks with their names, which is ``title`` where there is one."""
    for phase, spent in timing.get("phases", {}).items():
        yield phase, title if phase == "attack" else None, Spent(*spent)
    for name, own in timing.get("attacks", {}).items():
        yield from phases_of(own, name)
