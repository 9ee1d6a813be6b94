"""The rounds of the linear-region attack: sample a region near each best point, solve it, keep what is nearer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import Selectable, over_rows
from robust_ext.attacks.linear_region.network.regions import Regions
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.problem import RegionConstraints, estimate_scaling
from robust_ext.attacks.linear_region.solver import Solution, Status, solve
from robust_ext.attacks.linear_region.state import SearchRecord, SearchState
from robust_ext.core.random import stream

if TYPE_CHECKING:
    from robust_ext.attacks.linear_region.attack import LinearRegion

# Where the solver's point misses its region or the decision by a little, it is tried a little further out, and then
# nearer to the best point: every point between the two is nearer than that.
_FURTHER = (1.0, 1.003, 1.01)
_BACK = (0.1, 0.4)
# How far the nearest point is sought towards the input: regions end where they end, and little is to be won beyond.
_LEAST = 0.9
# Draws of a point whose region is new.
_DRAWS = 4
# Products for the factors of the rows, which need not be exact.
_PROBES, _POWER = 4, 4

# A sample, the pattern of a region and a class.
_Key = tuple[int, bytes, int]


@dataclass
class WarmStart(Selectable):
    """A first guess for the solver: the solution of the last region of the same start, which is a neighbour.

    The anchors ``(B, ...)`` are points of the last regions. Where there was none, multipliers and norms are 0. They
    and the factors need not be exact and a large network has many rows, so they are bfloat16 ``(B, M)``.
    """

    anchors: Tensor
    multipliers: Tensor
    factors: Tensor
    norm: Tensor

    @classmethod
    def blank(cls, points: Tensor, constraints: int) -> WarmStart:
        """Return that of starts with no region solved yet."""
        multipliers = points.new_zeros(len(points), constraints, dtype=torch.bfloat16)
        return cls(points.clone(), multipliers, torch.ones_like(multipliers), points.new_zeros(len(points)))

    def update(self, rows: Tensor, latest: WarmStart) -> None:
        """Replace that of these indices, int64; where one comes repeatedly, its last counts."""
        last = {row: place for place, row in enumerate(rows.tolist())}
        rows, places = torch.tensor([*last.items()], dtype=torch.int64, device=rows.device).view(-1, 2).unbind(1)
        for name, column in vars(self).items():
            column[rows] = getattr(latest, name)[places].to(column.dtype)

    def unscaled(self) -> Tensor:
        """Return which have no factors yet, bool ``(B,)``."""
        return self.norm == 0

    def scaling(
        self, constraints: RegionConstraints, inputs: Tensor, *, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return factors and norms of the last regions, or new ones for :meth:`unscaled` starts."""
        rows = self.unscaled().nonzero().flatten()
        factors, norm = self.factors.to(inputs), self.norm.clone()
        if len(rows):
            ways = {"probes": _PROBES, "power_iterations": _POWER}
            factors[rows], norm[rows] = estimate_scaling(
                constraints.select(rows), inputs[rows], generator=generator, **ways
            )
        return factors, norm


class RegionSearch:
    """Improves the points of starts, region by region; ``record.regions`` counts the regions solved for each input.

    The network is recorded at any points. The search holds the warm starts of all ``points (B, ...)``.
    """

    def __init__(
        self, attack: LinearRegion, oracle: BoundaryOracle, recorded: Regions, record: SearchRecord, points: Tensor
    ) -> None:
        self._attack, self._oracle, self._recorded, self._record = attack, oracle, recorded, record
        deciding = oracle.target.classes if oracle.targeted else 1
        self._warm = WarmStart.blank(points, recorded.constraints + deciding)
        # For each key a distance below which it has no adversarial point.
        self._bounds: dict[_Key, float] = {}

    def round(self, state: SearchState, starts: Tensor, *, draws: int, number: int, improvement: float) -> SearchState:
        """Return starts, nearer or unchanged, after solving ``draws`` regions near each.

        A start begins with the region of its own point; a region has to beat its start's distance by ``improvement``.
        The indices of the starts are int64 ``(B,)``.
        """
        points, distances = state.points.clone(), state.distances.clone()
        every = torch.arange(len(points), device=points.device).repeat_interleave(draws)
        # All draws of a start together, for its result not to depend on how the rows are split.
        for rows in torch.split(every, max(1, self._attack.batch // draws) * draws):
            warm = self._warm.select(starts[rows])
            places, latest, better = self._visit(state.select(rows), warm, number, improvement)
            self._warm.update(starts[rows[places]], latest)
            for place, point, distance in better:
                if distance < distances[rows[place]]:
                    points[rows[place]], distances[rows[place]] = point, distance
        return replace(state, points=points, distances=distances)

    def _visit(
        self, state: SearchState, warm: WarmStart, number: int, improvement: float
    ) -> tuple[Tensor, WarmStart, list[tuple[int, Tensor, Tensor]]]:
        """Return the start of each solved region, its next warm start, and what is nearer: start, point, distance."""
        anchors, places, keys = self._new_regions(state, state.distances * (1 - improvement), warm.unscaled())
        warm = warm.select(places)
        if len(places) == 0:
            return places, warm, []
        oracle, chosen = self._oracle, state.select(places)
        samples = chosen.sample_index
        labels, aims = oracle.labels[samples], torch.tensor([aim for _, _, aim in keys], device=samples.device)
        # Problem 10: the aim's logit less the label's. Targeted, problem 11: the label's less every logit.
        every = torch.eye(oracle.target.classes, device=labels.device)
        differences = (
            every[labels].unsqueeze(1) - every if oracle.targeted else (every[aims] - every[labels]).unsqueeze(1)
        )
        constraints = RegionConstraints(self._at(anchors, samples), differences, oracle.target.counter)
        found, factors, norm = self._solve(constraints, chosen, warm, number, improvement)
        bounds = torch.where(found.status == Status.CAP, torch.inf, found.bound)
        for key, bound in zip(keys, bounds.tolist(), strict=True):
            self._bounds[key] = max(bound, self._bounds.get(key, 0.0))
        # With several classes, a region is several problems.
        for sample, _ in {(sample, pattern) for sample, pattern, _ in keys}:
            self._record.regions[sample] += 1
        latest = WarmStart(anchors, found.multipliers, factors, norm)
        return places, latest, self._nearer(found, state, places)

    def _new_regions(self, state: SearchState, wanted: Tensor, at_points: Tensor) -> tuple[Tensor, Tensor, list[_Key]]:
        """Return points ``(R, ...)`` of regions that may be near enough, with the start and the key of each."""
        oracle, attack = self._oracle, self._attack
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
            inputs, bounds = oracle.inputs[part.sample_index], oracle.threat_model.bounds
            sampled = sample_near(part.points, inputs, part.streams, q=attack.q, gamma=attack.gamma, bounds=bounds)
            points = torch.where(over_rows(at_points[chosen], sampled) & (draw == 0), part.points, sampled)
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

    def _at(self, points: Tensor, sample_index: Tensor) -> Regions:
        self._oracle.target.counter.count_forward(len(points))
        self._oracle.spend(sample_index, 1)
        return self._recorded.at(points)

    def _classes(self, regions: Regions, sample_index: Tensor) -> Sequence[Sequence[int]]:
        """Return the classes whose problems to solve in each region."""
        labels = self._oracle.labels[sample_index].tolist()
        if self._oracle.targeted:
            return [[label] for label in labels]
        if self._attack.classes == "runner-up":
            return [[rival] for rival in self._oracle.margins(regions.logits, sample_index)[1].tolist()]
        return [[c for c in range(self._oracle.target.classes) if c != label] for label in labels]

    def _solve(
        self, constraints: RegionConstraints, state: SearchState, warm: WarmStart, number: int, improvement: float
    ) -> tuple[Solution, Tensor, Tensor]:
        oracle, samples, regions = self._oracle, state.sample_index, constraints.regions
        inputs, norm = oracle.inputs[samples].flatten(1), oracle.threat_model.norm
        # All rows share the probes, so that no row's result depends on the others.
        probes = stream(0, number, "scaling")
        scaling = warm.scaling(constraints, inputs, generator=probes)
        # 0 where a constraint changed its meaning since the regions before.
        multipliers = warm.multipliers.to(regions.dtype)
        multipliers[:, : regions.constraints] *= regions.agrees(self._at(warm.anchors, samples))
        found = solve(
            constraints,
            inputs,
            norm=norm,
            bounds=oracle.threat_model.bounds,
            best=state.distances * (1 - improvement),
            scaling=scaling,
            points=state.points.flatten(1),
            multipliers=multipliers,
            in_time=self._record.in_time,
            iterations=self._attack.iterations,
            tolerance=max(1e-3, improvement / 4),
        )
        began = 1 if norm == "l2" else 3
        oracle.spend(samples, 2 * found.iterations + began + warm.unscaled() * (1 + _PROBES + 2 * _POWER))
        return _without_overflow(found, *scaling, inputs)

    def _nearer(self, found: Solution, state: SearchState, places: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Return the adversarial points among the solver's: the start, the point and its distance."""
        oracle = self._oracle
        promising = (found.status == Status.SOLVED) | (found.status == Status.CAP)
        solved = found.points.view(-1, *self._recorded.shape)
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
        return list(zip(places.tolist(), points, oracle.distances(points, samples), strict=True))


def _without_overflow(
    found: Solution, factors: Tensor, norm: Tensor, inputs: Tensor
) -> tuple[Solution, Tensor, Tensor]:
    """Discard solutions of regions whose affine maps overflow, with their warm starts."""
    columns = (found.bound.masked_fill(found.bound == torch.inf, 0)[:, None], norm[:, None])
    parts = (found.points, found.multipliers, factors, *columns)
    lost = ~torch.stack([torch.isfinite(part).all(1) for part in parts]).all(0)
    if not bool(lost.any()):
        return found, factors, norm
    clean = Solution(
        points=torch.where(lost[:, None], inputs, found.points),
        bound=found.bound.masked_fill(lost, torch.inf),
        status=found.status.masked_fill(lost, int(Status.INFEASIBLE)),
        iterations=found.iterations,
        multipliers=found.multipliers.masked_fill(lost[:, None], 0),
    )
    return clean, factors.masked_fill(lost[:, None], 1), norm.masked_fill(lost, 0)


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
