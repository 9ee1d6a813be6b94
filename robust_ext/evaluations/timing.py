"""What an evaluation took: rows and seconds by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from robust_ext.core.cost import Spent
from robust_ext.engine.phases import phases_of
from robust_ext.engine.run import Outcome
from robust_ext.reports.timing import PHASES


class Part(NamedTuple):
    """What a phase took, of an attack or detector where it has several."""

    phase: str
    of: str | None
    spent: Spent


def time_table(outcomes: Iterable[Outcome[Any]], *, begun: float | None, others: Iterable[Part] = ()) -> dict[str, Any]:
    """Rows and seconds by phase, of these outcomes since ``begun`` and of earlier calls in the same folders.

    ``others`` are parts that no block states. Seconds are those of all processes that worked on blocks, and the last
    phase, ``"rest"``, is what no other one took. ``wall`` is how long this call took; None with ``begun``, where that
    is more than these outcomes; ``resumed`` is how many blocks an earlier call finished. Plain values.
    """
    left, wall = list(outcomes), None if begun is None else time.perf_counter() - begun
    found: defaultdict[tuple[str, str | None], list[Part]] = defaultdict(list)
    taken = (Part(*one) for run in left for timing in run.timings for one in phases_of(timing, run.run.title))
    for part in (*others, *taken):
        found[part.phase, part.of].append(part)
    # In the order of phases, and of attacks as they came.
    order = list(PHASES)
    rows = [_row(*found[key]) for key in sorted(found, key=lambda key: order.index(key[0]))]
    stated = sum(row["seconds"] for row in rows)
    earlier = sum(one.store.earlier for one in left)
    worked = sum(timing.get("seconds", 0.0) for one in left for timing in one.timings)
    seconds = max((wall or 0.0) + earlier, stated, worked)
    rest = _row(Part("rest", None, Spent(seconds=seconds - stated)))
    total = Spent(sum(row["forward"] for row in rows), sum(row["backward"] for row in rows), seconds)
    resumed = sum(one.store.resumed for one in left)
    return {"phases": [*rows, rest], "total": _numbers(total), "wall": wall, "resumed": resumed}


def parts_of(content: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of an evaluation inside another one, from its result, but for what they leave."""
    for row in content["time"]["phases"]:
        if row["phase"] != "rest":
            spent = Spent(row["forward"], row["backward"], row["seconds"])
            yield Part(row["phase"], row["of"], spent)


def _row(*parts: Part) -> dict[str, Any]:
    """A row of the table: parts of one phase."""
    return {"phase": parts[0].phase, "of": parts[0].of, **_numbers(Spent.total(part.spent for part in parts))}


def _numbers(spent: Spent) -> dict[str, Any]:
    return {**spent.passes, "seconds": spent.seconds}
