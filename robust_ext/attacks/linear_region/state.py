"""The starts of a search, where their solver begins, and the record of what the search has found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.regions import Regions
from robust_ext.attacks.linear_region.oracle import BoundaryOracle, nearest_rows
from robust_ext.attacks.linear_region.solver.problem import Constraints, Scaling, estimate_scaling
from robust_ext.attacks.native import Step, Watch

# Kinds of starts; those that are given come from outside.
KINDS = ("given", "descent", "boundary", "noise", "nearest")
# The share by which a new start may become nearer, and the factor by which it fades with each search.
_HOPE, _FADING = 0.2, 0.5

# Products for the factors of the rows, which need not be exact.
PROBES, POWER = 4, 4


@dataclass
class WarmStart:
    """A first guess for the solver: the solution of the last region of the same start, which is a neighbour.

    The anchors ``(B, ...)`` are points of the last regions. Where there was none, multipliers and norms are 0. They
    and the factors need not be exact and a large network has many rows, so they are bfloat16 ``(B, M)``.
    """

    anchors: Tensor
    multipliers: Tensor
    scaling: Scaling

    @classmethod
    def blank(cls, points: Tensor, constraints: int) -> WarmStart:
        """Return that of starts with no region solved yet."""
        multipliers = points.new_zeros(len(points), constraints, dtype=torch.bfloat16)
        scaling = Scaling(rows=torch.ones_like(multipliers), norm=points.new_zeros(len(points)))
        return cls(points.clone(), multipliers, scaling)

    def select(self, rows: Tensor) -> WarmStart:
        """Return that of these indices, int64."""
        return WarmStart(self.anchors[rows], self.multipliers[rows], self.scaling.select(rows))

    def update(self, rows: Tensor, latest: WarmStart) -> None:
        """Replace that of these indices, int64; where one comes repeatedly, its last counts."""
        last = {row: place for place, row in enumerate(rows.tolist())}
        rows = torch.tensor(list(last), dtype=torch.int64, device=rows.device)
        places = torch.tensor(list(last.values()), dtype=torch.int64, device=rows.device)
        self.anchors[rows] = latest.anchors[places]
        self.multipliers[rows] = latest.multipliers[places].to(torch.bfloat16)
        self.scaling.rows[rows] = latest.scaling.rows[places].to(torch.bfloat16)
        self.scaling.norm[rows] = latest.scaling.norm[places]

    def multipliers_for(self, regions: Regions, before: Regions) -> Tensor:
        """Return initial multipliers ``(B, M)``: 0 where a constraint changed its meaning since the regions before."""
        multipliers = self.multipliers.to(regions.dtype)
        multipliers[:, : regions.constraints] *= regions.agrees(before)
        return multipliers

    def scaling_for(self, constraints: Constraints, inputs: Tensor, *, generator: torch.Generator) -> Scaling:
        """Return the factors of the last regions, or new ones for :meth:`unscaled` starts."""
        rows = self.unscaled().nonzero().flatten()
        scaling = Scaling(rows=self.scaling.rows.to(inputs), norm=self.scaling.norm.clone())
        if len(rows) == 0:
            return scaling
        of_rows, steps = constraints.select(rows), {"probes": PROBES, "power_iterations": POWER}
        fresh = estimate_scaling(of_rows, inputs[rows], generator=generator, **steps)
        scaling.rows[rows], scaling.norm[rows] = fresh.rows, fresh.norm
        return scaling

    def unscaled(self) -> Tensor:
        """Return which have no factors yet, bool ``(B,)``."""
        return self.scaling.norm == 0


@dataclass
class SearchState:
    """The starts that are searched from, a row each, with the input each belongs to, int64 ``(B,)``.

    The points ``(B, ...)`` are the nearest adversarial ones, the distances float64; each start has a CPU generator.
    ``kinds`` are places in :data:`KINDS`, int64; ``hopes`` the shares by which starts may still become nearer, float64.
    """

    sample_index: Tensor
    points: Tensor
    distances: Tensor
    streams: list[torch.Generator]
    kinds: Tensor
    hopes: Tensor
    warm: WarmStart | None = None

    @classmethod
    def begin(
        cls, sample_index: Tensor, points: Tensor, distances: Tensor, streams: list[torch.Generator], kind: str
    ) -> SearchState:
        """Return starts of one kind."""
        kinds = torch.full_like(sample_index, KINDS.index(kind))
        return cls(sample_index, points, distances, streams, kinds, torch.full_like(distances, _HOPE))

    @classmethod
    def join(cls, parts: Sequence[SearchState]) -> SearchState:
        """Return all starts of several states with no region solved."""
        streams = [one for part in parts for one in part.streams]
        columns = [(part.sample_index, part.points, part.distances, part.kinds, part.hopes) for part in parts]
        samples, points, distances, kinds, hopes = map(torch.cat, zip(*columns, strict=True))
        return cls(samples, points, distances, streams, kinds, hopes)

    def select(self, rows: Tensor) -> SearchState:
        """Return the starts with these indices, int64."""
        streams = [self.streams[row] for row in rows.tolist()]
        warm = None if self.warm is None else self.warm.select(rows)
        samples, points, distances = self.sample_index[rows], self.points[rows], self.distances[rows]
        return SearchState(samples, points, distances, streams, self.kinds[rows], self.hopes[rows], warm)

    def update(self, rows: Tensor, latest: SearchState) -> None:
        """Replace starts with these indices, int64, after a search from them; their hopes fade."""
        gained = 1 - latest.distances / self.distances[rows]
        self.hopes[rows] = torch.maximum(gained, self.hopes[rows] * _FADING)
        self.points[rows], self.distances[rows] = latest.points, latest.distances
        if self.warm is not None and latest.warm is not None:
            self.warm.update(rows, latest.warm)

    def promising(self, most: int, open_samples: Tensor) -> Tensor:
        """Return indices of the ``most`` promising starts of each input that is open, bool ``(N,)``."""
        order = (self.distances * (1 - self.hopes)).argsort(stable=True)
        order = order[torch.isfinite(self.distances[order])]
        order = order[self.sample_index[order].argsort(stable=True)]
        samples = self.sample_index[order]
        place = torch.arange(len(samples), device=samples.device) - torch.searchsorted(samples, samples)
        return order[(place < most) & open_samples[samples]].sort().values


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """The state after one stage.

    Attributes:
        regions: Regions solved for each input so far, int64 ``(N,)``.
        passes: Rows sent forward and backward for each input so far, int64 ``(N,)``.
        seconds: CPU time of this process since the attack began.
        distances: Of the nearest adversarial point of each input, float64 ``(N,)``; infinite without one.
    """

    regions: Tensor
    passes: Tensor
    seconds: float
    distances: Tensor


@dataclass(frozen=True, kw_only=True)
class LinearRegionResult:
    """The result of a search.

    Attributes:
        candidates: The nearest adversarial point of each input, or the input itself, ``(N, ...)``.
        found: Where there is one, bool ``(N,)``.
        distances: Of the candidates, float64 ``(N,)``; infinite where none was found.
        kinds: The kind of start that led to each candidate, one of :data:`KINDS`; None where nothing was found, and
            where the input is adversarial as it is.
        regions: Regions solved for each input, int64 ``(N,)``.
        history: An entry after each kind of start, each hop, each round of regions, and at the end.
    """

    candidates: Tensor
    found: Tensor
    distances: Tensor
    kinds: tuple[str | None, ...]
    regions: Tensor
    history: tuple[HistoryEntry, ...]


class SearchRecord:
    """The one budget of a search, in passes or CPU seconds for each input, and its history.

    The nearest points themselves are kept by the oracle, which sees them first.
    """

    def __init__(self, oracle: BoundaryOracle, *, budget: float, unit: str, watch: Watch | None) -> None:
        self._oracle, self._budget, self._unit, self._watch = oracle, budget, unit, watch
        self._began, self._shown = time.process_time(), 0
        self._history: list[HistoryEntry] = []
        self._before = oracle.nearest.clone()
        self._kinds = torch.full_like(oracle.passes, -1)
        self.regions = torch.zeros_like(oracle.passes)

    def spent(self) -> Tensor:
        """Return the spent share of each input's budget, float64 ``(N,)``; may end above 1."""
        if self._unit == "passes":
            return self._oracle.passes / self._budget
        seconds = time.process_time() - self._began
        return torch.full_like(self._oracle.nearest, seconds / (self._budget * max(1, len(self._kinds))))

    def going(self, sample_index: Tensor, *, until: float | Tensor = 1.0) -> Tensor:
        """Return whether the search may continue, bool ``(B,)``, and show its progress; called before each step.

        Finished are inputs that are adversarial as they are, and those for which more than the share ``until`` of the
        budget is spent.
        """
        spent = self.spent()
        if self._watch is not None:
            self._shown += 1
            share = min(1.0, max(float(spent.amax()), 1e-3)) if len(spent) else 1.0
            total = max(self._shown, round(self._shown / share))
            points, loss = self._oracle.points.clone(), -self._oracle.nearest
            self._watch(Step(number=self._shown - 1, total=total, points=points, loss=loss))
        open_samples = (spent < until) & (self._oracle.nearest > 0)
        return open_samples[sample_index]

    def add(self, state: SearchState) -> None:
        """Append to the history, and note which kind of start led nearer since the last entry."""
        nearest = self._oracle.nearest
        found = torch.isfinite(state.distances).nonzero().flatten()
        found = found[nearest_rows(state.distances[found], state.sample_index[found])]
        latest = self._kinds.clone()
        latest[state.sample_index[found]] = state.kinds[found]
        self._kinds = torch.where(nearest < self._before, latest, self._kinds)
        self._before = nearest.clone()
        seconds, passes = time.process_time() - self._began, self._oracle.passes.clone()
        regions = self.regions.clone()
        self._history.append(HistoryEntry(regions=regions, passes=passes, seconds=seconds, distances=nearest.clone()))

    def result(self) -> LinearRegionResult:
        """Return the result."""
        return LinearRegionResult(
            candidates=self._oracle.points,
            found=torch.isfinite(self._oracle.nearest),
            distances=self._oracle.nearest,
            kinds=tuple(None if kind < 0 else KINDS[kind] for kind in self._kinds.tolist()),
            regions=self.regions,
            history=tuple(self._history),
        )
