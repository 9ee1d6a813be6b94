"""The rounds of the linear-region attack: sample a region near each best point, solve it, keep what is nearer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.region_constraints import (
    RegionConstraints,
    differences_from_all,
    differences_to,
)
from robust_ext.attacks.linear_region.judge import Judge
from robust_ext.attacks.linear_region.memory import POWER, PROBES, Memory
from robust_ext.attacks.linear_region.network.regions import Regions
from robust_ext.attacks.linear_region.runners import Runners
from robust_ext.attacks.linear_region.sampling import sample_near
from robust_ext.attacks.linear_region.settings import LinearRegionSettings
from robust_ext.attacks.linear_region.solver.solve import Solution, SolverSettings, Status, solve
from robust_ext.attacks.linear_region.solver.scaling import Scaling
from robust_ext.core.random import stream

# Where the solver's point misses its region or the decision by a little, it is tried a little further out, and then
# nearer to the best point: every point between the two is nearer than that.
_FURTHER = (1.0, 1.003, 1.01)
_BACK = (0.1, 0.4)
# How far the nearest point is sought towards the input: regions end where they end, and little is to be won beyond.
_LEAST = 0.9
# Draws of a point whose region is new.
_DRAWS = 4


class RegionSearch:
    """Improves the points of runners, region by region.

    Args:
        judge: Asks the network, and counts passes.
        recorded: The network as recorded at any points.
        settings: Those of the attack.

    Attributes:
        regions: Regions solved for each input, int64 ``(N,)``.
    """

    def __init__(self, judge: Judge, recorded: Regions, settings: LinearRegionSettings) -> None:
        self._judge, self._recorded, self._settings = judge, recorded, settings
        self.regions = torch.zeros(len(judge.inputs), dtype=torch.int64, device=judge.inputs.device)
        # For each region and class of an input, a distance below which it has no adversarial point.
        self._known: dict[tuple[int, bytes, int], float] = {}

    def round(self, runners: Runners, *, draws: int, number: int, improvement: float) -> Runners:
        """Solve regions near each runner.

        Args:
            runners: Where they are.
            draws: Regions for each.
            number: Of the round, from 0: the first looks at the points' own regions first.
            improvement: Share by which a region has to beat its runner's distance.

        Returns:
            The runners, each nearer or where it was.
        """
        points, distances, memory = runners.points.clone(), runners.distances.clone(), runners.memory
        if memory is None:
            deciding = self._judge.target.classes if self._judge.targeted else 1
            memory = Memory.blank(points, self._recorded.constraints + deciding)
        # A large network's memory is large, so it is not copied more often than it must be.
        runners = replace(runners, memory=None)
        every = torch.arange(len(points), device=points.device).repeat_interleave(draws)
        # All draws of a runner together, for its result not to depend on how the rows are split.
        for rows in torch.split(every, max(1, self._settings.batch // draws) * draws):
            places, learnt, better = self._visit(runners.select(rows), memory.select(rows), number, improvement)
            memory.update(rows[places], learnt)
            for place, point, distance in better:
                if distance < distances[rows[place]]:
                    points[rows[place]], distances[rows[place]] = point, distance
        return replace(runners, points=points, distances=distances, memory=memory)

    def _visit(
        self, runners: Runners, memory: Memory, number: int, improvement: float
    ) -> tuple[Tensor, Memory, list[tuple[int, Tensor, Tensor]]]:
        """Solve a region or more for each runner.

        Returns:
            The runner of each region, what is to be remembered of the region, and what is nearer: the runner, its new
            point and distance.
        """
        anchors, places, classes, keys = self._fresh(runners, runners.distances * (1 - improvement), sample=number > 0)
        memory = memory.select(places)
        if len(places) == 0:
            return places, memory, []
        judge, chosen = self._judge, runners.select(places)
        owners = chosen.owners
        if judge.targeted:
            differences = differences_from_all(judge.labels[owners], count=judge.target.classes)
        else:
            differences = differences_to(classes, judge.labels[owners], count=judge.target.classes)
        regions = self._at(anchors, owners)
        constraints = RegionConstraints(regions, differences.to(regions.logits), judge.target.counter)
        found, scaling = self._solve(constraints, chosen, memory, number, improvement)
        bounds = torch.where(found.status == Status.CAP, torch.inf, found.bound)
        for key, bound in zip(keys, bounds.tolist(), strict=True):
            self._known[key] = max(bound, self._known.get(key, 0.0))
        self.regions.index_add_(0, owners, torch.ones_like(owners))
        return places, Memory(anchors, found.multipliers, scaling), self._better(found, runners, places)

    def _fresh(
        self, runners: Runners, wanted: Tensor, *, sample: bool
    ) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, bytes, int]]]:
        """Points of regions that may hold what is wanted, the runner and class of each, and their keys."""
        open_rows = list(range(len(runners.streams)))
        sampled: list[Tensor] = []
        places: list[int] = []
        keys: list[tuple[int, bytes, int]] = []
        taken: set[tuple[int, bytes, int]] = set()
        limits = wanted.tolist()
        for _ in range(_DRAWS):
            if not open_rows:
                break
            rows = torch.tensor(open_rows, device=wanted.device)
            part = runners.select(rows)
            points = self._sampled(part) if sample else part.points
            regions = self._at(points, part.owners)
            left = []
            for place, (row, pattern, ranked) in enumerate(
                zip(open_rows, regions.pattern(), self._classes(regions, part.owners), strict=True)
            ):
                owner = int(part.owners[place])
                wished = [(owner, pattern, c) for c in ranked]
                new = [key for key in wished if key not in taken and self._known.get(key, 0.0) < limits[row]]
                taken |= {*new}
                if not new:
                    left.append(row)
                sampled += [points[place]] * len(new)
                places += [row] * len(new)
                keys += new
            open_rows, sample = left, True
        device = wanted.device
        rows = torch.tensor(places, dtype=torch.int64, device=device)
        anchors = torch.stack(sampled) if sampled else runners.points[:0]
        return anchors, rows, torch.tensor([key[2] for key in keys], dtype=torch.int64, device=device), keys

    def _sampled(self, runners: Runners) -> Tensor:
        judge, settings = self._judge, self._settings
        inputs, bounds = judge.inputs[runners.owners], judge.threat_model.bounds
        return sample_near(runners.points, inputs, runners.streams, q=settings.q, gamma=settings.gamma, bounds=bounds)

    def _at(self, points: Tensor, owners: Tensor) -> Regions:
        self._judge.target.counter.count_forward(len(points))
        self._judge.spend(owners, 1)
        return self._recorded.at(points)

    def _classes(self, regions: Regions, owners: Tensor) -> Sequence[Sequence[int]]:
        """The classes whose problems are solved in each region."""
        labels = self._judge.labels[owners]
        if self._judge.targeted:
            return [[label] for label in labels.tolist()]
        if self._settings.classes == "runner-up":
            return [[rival] for rival in self._judge.margins(regions.logits, owners)[1].tolist()]
        every = range(self._judge.target.classes)
        return [[c for c in every if c != label] for label in labels.tolist()]

    def _solve(
        self, constraints: RegionConstraints, runners: Runners, memory: Memory, number: int, improvement: float
    ) -> tuple[Solution, Scaling]:
        judge, owners = self._judge, runners.owners
        inputs, norm = judge.inputs[owners].flatten(1), judge.threat_model.norm
        # The probes are the same whatever the rows, for a row's result not to depend on the others.
        probes = stream(0, number, "scaling")
        scaling = memory.factors(constraints, inputs, generator=probes)
        found = solve(
            constraints,
            inputs,
            norm=norm,
            bounds=judge.threat_model.bounds,
            generator=probes,
            best=runners.distances * (1 - improvement),
            scaling=scaling,
            points=runners.points.flatten(1),
            multipliers=memory.begin(constraints.regions, self._at(memory.anchors, owners)),
            settings=SolverSettings(iterations=self._settings.iterations, tolerance=max(1e-3, improvement / 4)),
        )
        began = 1 if norm == "l2" else 3
        judge.spend(owners, 2 * found.iterations + began + memory.unknown() * (1 + PROBES + 2 * POWER))
        return found, scaling

    def _better(self, found: Solution, runners: Runners, places: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """What is adversarial and nearer than before: the runner, its new point and distance."""
        judge = self._judge
        promising = (found.status == Status.SOLVED) | (found.status == Status.CAP)
        solved = found.points.view(-1, *self._recorded.shape)
        near = judge.distances(solved, runners.owners[places]) < runners.distances[places]
        rows = (promising & near).nonzero().flatten()
        owners, solved, places = runners.owners[places[rows]], solved[rows], places[rows]
        points = solved.clone()
        good = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for further, back in [*((factor, 0.0) for factor in _FURTHER), *((1.0, share) for share in _BACK)]:
            left = (~good).nonzero().flatten()
            if len(left) == 0:
                break
            tried = torch.lerp(judge.inputs[owners[left]], solved[left], further)
            tried = torch.lerp(tried, runners.points[places[left]], back).clamp_(*judge.threat_model.bounds)
            points[left] = tried
            good[left] = judge.adversarial(tried, owners[left])
        points, owners, places = points[good], owners[good], places[good]
        points = judge.drawn_in(points, owners, least=_LEAST, halvings=6)
        distances = judge.distances(points, owners)
        best: dict[int, tuple[Tensor, Tensor]] = {}
        for place, point, distance in zip(places.tolist(), points, distances, strict=True):
            if distance < best.get(place, (point, runners.distances[place]))[1]:
                best[place] = point, distance
        return [(place, *entry) for place, entry in best.items()]
