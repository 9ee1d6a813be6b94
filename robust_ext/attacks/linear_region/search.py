"""The rounds of the linear-region attack: sample a region near each best point, solve it, keep what is nearer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.regions import Regions
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.solver.problem import RegionConstraints, Scaling
from robust_ext.attacks.linear_region.solver.solve import Solution, Status, solve
from robust_ext.attacks.linear_region.state import POWER, PROBES, SearchState, WarmStart
from robust_ext.core.random import stream

# Where the solver's point misses its region or the decision by a little, it is tried a little further out, and then
# nearer to the best point: every point between the two is nearer than that.
_FURTHER = (1.0, 1.003, 1.01)
_BACK = (0.1, 0.4)
# How far the nearest point is sought towards the input: regions end where they end, and little is to be won beyond.
_LEAST = 0.9
# Draws of a point whose region is new.
_DRAWS = 4

# A sample, the pattern of a region and a class.
_Key = tuple[int, bytes, int]


@dataclass
class RegionSearch:
    """Improves the points of starts, region by region.

    The network is recorded at any points, the settings are those of the attack; ``regions`` counts the regions solved
    for each input, int64 ``(N,)``.
    """

    oracle: BoundaryOracle
    recorded: Regions
    batch: int
    q: float
    gamma: float
    classes: str
    iterations: int
    in_time: Callable[[], bool]
    regions: Tensor = field(init=False)
    # For each key a distance below which it has no adversarial point.
    _bounds: dict[_Key, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.regions = torch.zeros_like(self.oracle.passes)

    def warmed(self, state: SearchState) -> SearchState:
        """Return the starts with no region solved yet."""
        deciding = self.oracle.target.classes if self.oracle.targeted else 1
        return replace(state, warm=WarmStart.blank(state.points, self.recorded.constraints + deciding))

    def round(self, state: SearchState, *, draws: int, number: int, improvement: float) -> SearchState:
        """Return the starts, nearer or unchanged, after solving ``draws`` regions near each.

        A start begins with the region of its own point; a region has to beat its start's distance by ``improvement``.
        """
        points, distances, warm = state.points.clone(), state.distances.clone(), state.warm
        if warm is None:
            raise ValueError("the starts are to be warmed first")
        # A large network's multipliers are large, so they are not copied more often than they must be.
        state = replace(state, warm=None)
        every = torch.arange(len(points), device=points.device).repeat_interleave(draws)
        # All draws of a start together, for its result not to depend on how the rows are split.
        for rows in torch.split(every, max(1, self.batch // draws) * draws):
            places, latest, better = self._visit(state.select(rows), warm.select(rows), number, improvement)
            warm.update(rows[places], latest)
            for place, point, distance in better:
                if distance < distances[rows[place]]:
                    points[rows[place]], distances[rows[place]] = point, distance
        return replace(state, points=points, distances=distances, warm=warm)

    def _visit(
        self, state: SearchState, warm: WarmStart, number: int, improvement: float
    ) -> tuple[Tensor, WarmStart, list[tuple[int, Tensor, Tensor]]]:
        """Return the start of each solved region, its next warm start, and what is nearer: start, point, distance."""
        anchors, places, keys = self._new_regions(state, state.distances * (1 - improvement), warm.unscaled())
        warm = warm.select(places)
        if len(places) == 0:
            return places, warm, []
        oracle, chosen = self.oracle, state.select(places)
        samples = chosen.sample_index
        labels, aims = oracle.labels[samples], torch.tensor([aim for _, _, aim in keys], device=samples.device)
        differences = _class_differences(labels, aims, count=oracle.target.classes, targeted=oracle.targeted)
        constraints = RegionConstraints(self._at(anchors, samples), differences, oracle.target.counter)
        found, scaling = self._solve(constraints, chosen, warm, number, improvement)
        bounds = torch.where(found.status == Status.CAP, torch.inf, found.bound)
        for key, bound in zip(keys, bounds.tolist(), strict=True):
            self._bounds[key] = max(bound, self._bounds.get(key, 0.0))
        # With several classes, a region is several problems.
        for sample, _ in {(sample, pattern) for sample, pattern, _ in keys}:
            self.regions[sample] += 1
        return places, WarmStart(anchors, found.multipliers, scaling), self._nearer(found, state, places)

    def _new_regions(self, state: SearchState, wanted: Tensor, at_points: Tensor) -> tuple[Tensor, Tensor, list[_Key]]:
        """Return points ``(R, ...)`` of regions that may be near enough, with the start and the key of each."""
        open_rows = list(range(len(state.streams)))
        anchors: list[Tensor] = []
        places: list[int] = []
        keys: list[_Key] = []
        limits = wanted.tolist()
        for draw in range(_DRAWS):
            if not open_rows:
                break
            chosen = torch.tensor(open_rows, device=wanted.device)
            part = state.select(chosen)
            own = at_points[chosen].view(-1, *[1] * (part.points.dim() - 1)) & (draw == 0)
            points = torch.where(own, part.points, self._sampled(part))
            regions = self._at(points, part.sample_index)
            classes_of = self._classes(regions, part.sample_index)
            found = zip(open_rows, points, part.sample_index.tolist(), regions.pattern(), classes_of, strict=True)
            open_rows = []
            for row, point, sample, pattern, classes in found:
                candidates = [(sample, pattern, c) for c in classes]
                new = [key for key in candidates if key not in keys and self._bounds.get(key, 0.0) < limits[row]]
                if not new:
                    open_rows.append(row)
                anchors += [point] * len(new)
                places += [row] * len(new)
                keys += new
        stacked = torch.stack(anchors) if anchors else state.points[:0]
        return stacked, torch.tensor(places, dtype=torch.int64, device=wanted.device), keys

    def _sampled(self, state: SearchState) -> Tensor:
        inputs, bounds = self.oracle.inputs[state.sample_index], self.oracle.threat_model.bounds
        return sample_near(state.points, inputs, state.streams, q=self.q, gamma=self.gamma, bounds=bounds)

    def _at(self, points: Tensor, sample_index: Tensor) -> Regions:
        self.oracle.target.counter.count_forward(len(points))
        self.oracle.spend(sample_index, 1)
        return self.recorded.at(points)

    def _classes(self, regions: Regions, sample_index: Tensor) -> Sequence[Sequence[int]]:
        """Return the classes whose problems to solve in each region."""
        labels = self.oracle.labels[sample_index]
        if self.oracle.targeted:
            return [[label] for label in labels.tolist()]
        if self.classes == "runner-up":
            return [[rival] for rival in self.oracle.margins(regions.logits, sample_index)[1].tolist()]
        every = range(self.oracle.target.classes)
        return [[c for c in every if c != label] for label in labels.tolist()]

    def _solve(
        self, constraints: RegionConstraints, state: SearchState, warm: WarmStart, number: int, improvement: float
    ) -> tuple[Solution, Scaling]:
        oracle, samples = self.oracle, state.sample_index
        inputs, norm = oracle.inputs[samples].flatten(1), oracle.threat_model.norm
        # All rows share the probes, so that no row's result depends on the others.
        probes = stream(0, number, "scaling")
        scaling = warm.scaling_for(constraints, inputs, generator=probes)
        found = solve(
            constraints,
            inputs,
            norm=norm,
            bounds=oracle.threat_model.bounds,
            generator=probes,
            best=state.distances * (1 - improvement),
            scaling=scaling,
            points=state.points.flatten(1),
            multipliers=warm.multipliers_for(constraints.regions, self._at(warm.anchors, samples)),
            in_time=self.in_time,
            iterations=self.iterations,
            tolerance=max(1e-3, improvement / 4),
        )
        began = 1 if norm == "l2" else 3
        oracle.spend(samples, 2 * found.iterations + began + warm.unscaled() * (1 + PROBES + 2 * POWER))
        return _without_overflow(found, scaling, inputs)

    def _nearer(self, found: Solution, state: SearchState, places: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Return the adversarial points among the solver's: the start, the point and its distance."""
        oracle = self.oracle
        promising = (found.status == Status.SOLVED) | (found.status == Status.CAP)
        solved = found.points.view(-1, *self.recorded.shape)
        near = oracle.distances(solved, state.sample_index[places]) < state.distances[places]
        rows = (promising & near).nonzero().flatten()
        samples, solved, places = state.sample_index[places[rows]], solved[rows], places[rows]
        points = solved.clone()
        good = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for further, back in [*((factor, 0.0) for factor in _FURTHER), *((1.0, share) for share in _BACK)]:
            left = (~good).nonzero().flatten()
            if len(left) == 0:
                break
            tried = torch.lerp(oracle.inputs[samples[left]], solved[left], further)
            tried = torch.lerp(tried, state.points[places[left]], back).clamp_(*oracle.threat_model.bounds)
            points[left] = tried
            good[left] = oracle.adversarial(tried, samples[left])
        points, samples, places = points[good], samples[good], places[good]
        points = oracle.bisect_to_input(points, samples, least=_LEAST, halvings=6)
        distances = oracle.distances(points, samples)
        return list(zip(places.tolist(), points, distances, strict=True))


def _class_differences(labels: Tensor, aims: Tensor, *, count: int, targeted: bool) -> Tensor:
    """Return combinations of logits, float32 ``(B, R, count)``, that are at least 0 where a point is adversarial.

    Labels and aims are int64 ``(B,)``. Untargeted: the logit of the aim minus that of the label, the one row of
    problem 10. Targeted: the logit of the label minus every logit, the rows of problem 11, its own being 0.
    """
    every = torch.eye(count, device=labels.device)
    return every[labels].unsqueeze(1) - every if targeted else (every[aims] - every[labels]).unsqueeze(1)


def _without_overflow(found: Solution, scaling: Scaling, inputs: Tensor) -> tuple[Solution, Scaling]:
    """Discard solutions of regions whose affine maps overflow, with their warm starts."""
    columns = (found.bound.masked_fill(found.bound == torch.inf, 0)[:, None], scaling.norm[:, None])
    parts = (found.points, found.multipliers, scaling.rows, *columns)
    lost = ~torch.stack([torch.isfinite(part).all(1) for part in parts]).all(0)
    if not bool(lost.any()):
        return found, scaling
    none = int(Status.INFEASIBLE)
    clean = Solution(
        points=torch.where(lost[:, None], inputs, found.points),
        bound=found.bound.masked_fill(lost, torch.inf),
        status=found.status.masked_fill(lost, none),
        iterations=found.iterations,
        multipliers=found.multipliers.masked_fill(lost[:, None], 0),
    )
    return clean, Scaling(rows=scaling.rows.masked_fill(lost[:, None], 1), norm=scaling.norm.masked_fill(lost, 0))


def sample_near(
    points: Tensor,
    inputs: Tensor,
    streams: Sequence[torch.Generator],
    *,
    q: float,
    gamma: float,
    bounds: tuple[float, float],
) -> Tensor:
    """Draw a point near each of ``(B, ...)``, by equations 12 to 14 of Croce, Rauber and Hein (2019), clipped."""
    offsets = (points - inputs).flatten(1)
    size = offsets.norm(dim=1, keepdim=True).clamp_min_(torch.finfo(offsets.dtype).tiny)
    outward = offsets / size
    normal = torch.stack([torch.randn(offsets.shape[1], generator=one) for one in streams]).to(offsets)
    drawn = torch.stack([torch.rand(3, generator=one) for one in streams]).to(offsets)
    side, angle, reach = drawn[:, :1], drawn[:, 1:2], drawn[:, 2:]
    across = normal - (normal * outward).sum(1, keepdim=True) * outward
    across = across / across.norm(dim=1, keepdim=True).clamp_min_(torch.finfo(offsets.dtype).tiny)
    angle = torch.where(side < q, 1.0, -1.0) * angle * math.pi
    direction = angle.cos() * across - angle.sin() * outward
    moved: Tensor = (points.flatten(1) + size * reach**gamma * direction).clamp_(*bounds)
    return moved.view_as(points)
