"""What an evaluation took: rows and seconds by phase, and the floor, which is what these rows take as bare passes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from robust_ext.core.cost import Cost, Spent
from robust_ext.engine.phases import Pace, phases_of
from robust_ext.engine.run import Outcome
from robust_ext.reports.timing import PHASES


class Part(NamedTuple):
    """What a phase took, of an attack or detector where it has several, and the seconds of its bare passes if known."""

    phase: str
    of: str | None
    spent: Spent
    floor: float | None = None


def time_table(outcomes: Iterable[Outcome[Any]], *, begun: float | None, others: Iterable[Part] = ()) -> dict[str, Any]:
    """Rows and seconds by phase, of these outcomes since ``begun`` and of earlier calls in the same folders.

    ``others`` are parts that no block states. Seconds are those of all processes that worked on blocks, and the last
    phase, ``"rest"``, is what no other one took. ``wall`` is how long this call took; None with ``begun``, where that
    is more than these outcomes; ``resumed`` is how many blocks an earlier call finished. Plain values.
    """
    left, wall = list(outcomes), None if begun is None else time.perf_counter() - begun
    found: defaultdict[tuple[str, str | None], list[Part]] = defaultdict(list)
    for part in (*others, *_parts(left)):
        found[part.phase, part.of].append(part)
    # In the order of phases, and of attacks as they came.
    order = list(PHASES)
    rows = [_row(*found[key]) for key in sorted(found, key=lambda key: order.index(key[0]))]
    stated = sum(row["seconds"] for row in rows)
    earlier = sum(one.store.earlier for one in left)
    worked = sum(timing.get("seconds", 0.0) for one in left for timing in one.timings)
    seconds = max((wall or 0.0) + earlier, stated, worked)
    floor = sum(row["floor"] or 0.0 for row in rows)
    rest = _row(Part("rest", None, Spent(seconds=seconds - stated)))
    total = Spent(sum(row["forward"] for row in rows), sum(row["backward"] for row in rows), seconds)
    resumed = sum(one.store.resumed for one in left)
    return {"phases": [*rows, rest], "total": _numbers(total, floor or None), "wall": wall, "resumed": resumed}


def parts_of(content: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of an evaluation inside another one, from its result, but for what they leave."""
    for row in content["time"]["phases"]:
        if row["phase"] != "rest":
            spent = Spent(row["forward"], row["backward"], row["seconds"])
            yield Part(row["phase"], row["of"], spent, row["floor"])


def _row(*parts: Part) -> dict[str, Any]:
    """A row of the table: parts of one phase."""
    floors = [part.floor for part in parts if part.floor is not None]
    numbers = _numbers(Spent.total(part.spent for part in parts), sum(floors) if floors else None)
    return {"phase": parts[0].phase, "of": parts[0].of, **numbers}


def _numbers(spent: Spent, floor: float | None) -> dict[str, Any]:
    return {
        **spent.passes,
        "seconds": spent.seconds,
        "floor": floor,
    }


def _parts(left: Sequence[Outcome[Any]]) -> Iterator[Part]:
    """What the blocks of runs state; bare passes of one network are those that were timed in any of its runs."""
    probes = [one.run.probe() for one in left]
    timed: defaultdict[int, list[Sequence[float | None]]] = defaultdict(list)
    for one, probe in zip(left, probes, strict=True):
        if probe is not None:
            timed[id(probe.network)] += [entry for timing in one.timings for entry in timing.get("speed", ())]
    for one, probe in zip(left, probes, strict=True):
        pace = None if probe is None else Pace(probe, timed[id(probe.network)])
        for timing in one.timings:
            for phase, of, spent in phases_of(timing, one.run.title):
                rows = Cost(spent.forward, spent.backward)
                yield Part(phase, of, spent, None if pace is None else pace.seconds(phase, rows))
