"""The rounds of the linear-region attack: sample a region near each best point, solve it, keep what is nearer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.adapter_constraints import (
    RegionConstraints,
    differences_from_all,
    differences_to,
)
from robust_ext.attacks.linear_region.judge import Judge
from robust_ext.attacks.linear_region.region import Regions
from robust_ext.attacks.linear_region.sampling import sample_near
from robust_ext.attacks.linear_region.settings import LinearRegionSettings
from robust_ext.attacks.linear_region.solver import Solution, SolverSettings, Status, solve
from robust_ext.attacks.linear_region.solver_scaling import estimate_scaling
from robust_ext.random_streams import stream

# Products for the factors of the rows, which need not be exact.
_PROBES, _POWER = 4, 4
# Where the solver's point misses its region or the decision by a little, it is tried a little further out, and then
# nearer to the best point: every point between the two is nearer than that.
_FURTHER = (1.0, 1.003, 1.01)
_BACK = (0.1, 0.4)
# How far the nearest point is sought towards the input: regions end where they end, and little is to be won beyond.
_LEAST = 0.9
# Draws of a point whose region is new.
_DRAWS = 4


@dataclass
class Runners:
    """The starts that are still in the race, a row each.

    Args:
        owners: The inputs they belong to, int64 ``(B,)``.
        points: The nearest adversarial point of each, ``(B, ...)``.
        distances: Of these, float64 ``(B,)``.
        streams: A CPU generator for each.
    """

    owners: Tensor
    points: Tensor
    distances: Tensor
    streams: list[torch.Generator]

    def select(self, rows: Tensor) -> Runners:
        """Those of these indices, int64."""
        chosen = [self.streams[row] for row in rows.tolist()]
        return Runners(self.owners[rows], self.points[rows], self.distances[rows], chosen)

    def ranked(self, most: int, open_inputs: Tensor) -> Runners:
        """The ``most`` nearest of each input that is still open, bool ``(N,)``."""
        order = self.distances.argsort(stable=True)
        order = order[self.owners[order].argsort(stable=True)]
        owners = self.owners[order]
        place = torch.arange(len(owners), device=owners.device) - torch.searchsorted(owners, owners)
        return self.select(order[(place < most) & open_inputs[owners]].sort().values)


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
        points, distances = runners.points.clone(), runners.distances.clone()
        every = torch.arange(len(points), device=points.device).repeat_interleave(draws)
        for rows in torch.split(every, self._settings.batch):
            for place, point, distance in self._visit(runners.select(rows), number, improvement):
                if distance < distances[rows[place]]:
                    points[rows[place]], distances[rows[place]] = point, distance
        return Runners(runners.owners, points, distances, runners.streams)

    def _visit(self, runners: Runners, number: int, improvement: float) -> list[tuple[int, Tensor, Tensor]]:
        wanted = runners.distances * (1 - improvement)
        regions, places, classes, keys = self._fresh(runners, wanted, sample=number > 0)
        if len(places) == 0:
            return []
        judge, owners = self._judge, runners.owners[places]
        if judge.targeted:
            differences = differences_from_all(judge.labels[owners], count=judge.target.classes)
        else:
            differences = differences_to(classes, judge.labels[owners], count=judge.target.classes)
        constraints = RegionConstraints(regions, differences.to(regions.logits), judge.target.counter)
        found = self._solve(constraints, owners, wanted[places], number, improvement)
        bounds = torch.where(found.status == Status.CAP, torch.inf, found.bound)
        for key, bound in zip(keys, bounds.tolist(), strict=True):
            self._known[key] = max(bound, self._known.get(key, 0.0))
        self.regions.index_add_(0, owners, torch.ones_like(owners))
        return self._better(found, runners, places)

    def _fresh(
        self, runners: Runners, wanted: Tensor, *, sample: bool
    ) -> tuple[Regions, Tensor, Tensor, list[tuple[int, bytes, int]]]:
        """Regions that may hold what is wanted, the runner and class of each, and the keys to remember them by."""
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
        shape = (len(rows), *self._recorded.shape)
        whole = self._at(torch.stack(sampled) if sampled else self._judge.inputs.new_zeros(shape), runners.owners[rows])
        return whole, rows, torch.tensor([key[2] for key in keys], dtype=torch.int64, device=device), keys

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
        self, constraints: RegionConstraints, owners: Tensor, wanted: Tensor, number: int, improvement: float
    ) -> Solution:
        judge = self._judge
        inputs = judge.inputs[owners].flatten(1)
        # The probes are the same whatever the rows, for a row's result not to depend on the others.
        probes = stream(0, number, "scaling")
        scaling = estimate_scaling(constraints, inputs, generator=probes, probes=_PROBES, power_iterations=_POWER)
        found = solve(
            constraints,
            inputs,
            norm=judge.threat_model.norm,
            bounds=judge.threat_model.bounds,
            generator=probes,
            best=wanted,
            scaling=scaling,
            settings=SolverSettings(iterations=self._settings.iterations, tolerance=max(1e-3, improvement / 4)),
        )
        judge.spend(owners, 2 * found.iterations + (2 + _PROBES + 2 * _POWER))
        return found

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
