"""Depth: the problems of a group posed again, with the boundary deeper than the planted point.

The depth of a point is its reach: 1 at the planted point, counted from the closest inner one. A problem of depth d has
the same readout and its boundary at reach d. It is posed where a *witness* proves that it can be solved: a point in
bounds and ball of greater reach, verified through the whole network, found by any attack of the run, at any depth, or
by those of the project (:mod:`robust_ext.evaluations.binarization.witnesses`). It takes the planted point's place, and
is checked again like it before each attack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from robust_ext.engine.task import Work
from robust_ext.evaluations.binarization.attacking import Attacked, ProblemAttack
from robust_ext.evaluations.binarization.problems import Problems


@dataclass
class Deepest:
    """The deepest verified point of each sample, by id."""

    reach: dict[int, float] = field(default_factory=dict)
    points: dict[int, Tensor] = field(default_factory=dict)

    def take(self, reach: Mapping[int, float], points: Mapping[int, Tensor]) -> None:
        """Keep what is deeper than what is there."""
        for sample, value in reach.items():
            if value > self.reach.get(sample, 0.0):
                self.reach[sample], self.points[sample] = value, points[sample]

    def beyond(self, sample: int, depth: float) -> bool:
        """Whether a problem of this depth is known to have a solution."""
        return self.reach.get(sample, 0.0) > depth


def pose_deeper(
    problems: Problems,
    attacks: Mapping[str, ProblemAttack],
    results: Mapping[str, Attacked],
    known: Deepest,
    depths: tuple[float, ...],
) -> Work[None]:
    """Run attacks at these depths, increasing, and add what they did to their records.

    ``results`` are those of the test itself, ``known`` what the project's own attacks found. A problem that an attack's
    earlier candidate solves is solved, and not posed to it again; one that solves nothing at a depth is not run at
    further ones. Attacks that imitate references are not run: these need not be class 1 beyond a deeper boundary.
    """
    own = {name: _verified(result) for name, result in results.items()}
    for name, result in results.items():
        known.take(own[name].reach, own[name].points)
        for sample, record in result.records.items():
            record["deepest"] = own[name].reach.get(sample)
            record["depths"] = []
    solving = {name: bool(own[name].reach) for name in results}
    for depth in depths:
        rows = [row for row, sample in enumerate(problems.samples) if known.beyond(sample, depth)]
        if not rows:
            break
        points = torch.stack([known.points[problems.samples[row]] for row in rows])
        deeper = replace(problems.select(rows), planted=points[:, None])
        found: list[Deepest] = []
        for name, attack in attacks.items():
            if attack.attack.traits.references:
                continue
            deep = replace(attack, depth=depth, canaries=frozenset())
            found.append((yield from _attack(deep, deeper, results[name], own[name], run=solving[name])))
            solving[name] = any(_solved(record, depth) for record in results[name].records.values())
        # After all of them: the problems of a depth do not depend on the order of the attacks.
        for one in found:
            known.take(one.reach, one.points)


def _attack(attack: ProblemAttack, problems: Problems, result: Attacked, own: Deepest, *, run: bool) -> Work[Deepest]:
    """One attack at one depth; what it found is added to its own points, and returned."""
    assert attack.depth is not None
    depth = attack.depth
    posed = [row for row, sample in enumerate(problems.samples) if result.records[sample]["outcome"] != "not_planted"]
    left = [row for row in posed if not own.beyond(problems.samples[row], depth)]
    again = Attacked()
    if run and left:
        again = yield from attack.run(problems.select(left))
        result.add(again.spent)
    for row in posed:
        sample = problems.samples[row]
        result.records[sample]["depths"].append({"depth": depth, **_entry(again, sample, own, depth)})
    found = _verified(again)
    own.take(found.reach, found.points)
    for sample in found.reach:
        result.records[sample]["deepest"] = own.reach[sample]
    return found


def _entry(again: Attacked, sample: int, own: Deepest, depth: float) -> dict[str, Any]:
    """What became of a problem: as in a record, or ``"not_run"``."""
    if own.beyond(sample, depth):
        return {"outcome": "found", "reach": own.reach[sample]}
    if sample not in again.records:
        return {"outcome": "not_run", "reach": None}
    return {key: again.records[sample][key] for key in ("outcome", "reach")}


def _solved(record: Mapping[str, Any], depth: float) -> bool:
    return any(entry["depth"] == depth and entry["outcome"] == "found" for entry in record["depths"])


def _verified(result: Attacked) -> Deepest:
    """The points that an attack found and their reach."""
    good = {sample: record["reach"] for sample, record in result.records.items() if record["outcome"] == "found"}
    reach = {sample: value for sample, value in good.items() if value is not None}
    return Deepest(reach, {sample: result.candidates[sample] for sample in reach})
