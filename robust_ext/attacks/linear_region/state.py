"""The starts of a linear-region attack that are still searched from, and where their solver begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.regions import Regions
from robust_ext.attacks.linear_region.solver.constraints import Constraints
from robust_ext.attacks.linear_region.solver.problem import Scaling, estimate_scaling

# Kinds of starts; those that are given come from outside.
KINDS = ("given", "descent", "boundary", "noise", "nearest")
# By how much a start that was not searched from yet may become nearer, and how much of it is left after each search
# that did not make it nearer by more.
_HOPE, _FADING = 0.2, 0.5

# Products for the factors of the rows, which need not be exact.
PROBES, POWER = 4, 4


@dataclass
class WarmStart:
    """Where the solver begins: a sampled region is a neighbour of the last one of its start, and so is its solution.

    The anchors ``(B, ...)`` are points of the last regions. Where there was none, multipliers and norms are 0. They
    and the factors need not be exact and a large network has many rows, so they are bfloat16 ``(B, M)``.
    """

    anchors: Tensor
    multipliers: Tensor
    scaling: Scaling

    @classmethod
    def blank(cls, points: Tensor, constraints: int) -> WarmStart:
        """That of starts with no region solved yet."""
        multipliers = points.new_zeros(len(points), constraints, dtype=torch.bfloat16)
        scaling = Scaling(rows=torch.ones_like(multipliers), norm=points.new_zeros(len(points)))
        return cls(points.clone(), multipliers, scaling)

    def select(self, rows: Tensor) -> WarmStart:
        """That of these indices, int64."""
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
        """Multipliers ``(B, M)`` to begin with in regions: 0 where a constraint means another than in those before."""
        multipliers = self.multipliers.to(regions.dtype)
        multipliers[:, : regions.constraints] *= regions.agrees(before)
        return multipliers

    def scaling_for(self, constraints: Constraints, inputs: Tensor, *, generator: torch.Generator) -> Scaling:
        """The factors of the last regions, or new ones where there are none, see :meth:`unscaled`."""
        rows = self.unscaled().nonzero().flatten()
        scaling = Scaling(rows=self.scaling.rows.to(inputs), norm=self.scaling.norm.clone())
        if len(rows) == 0:
            return scaling
        of_rows, steps = constraints.select(rows), {"probes": PROBES, "power_iterations": POWER}
        fresh = estimate_scaling(of_rows, inputs[rows], generator=generator, **steps)
        scaling.rows[rows], scaling.norm[rows] = fresh.rows, fresh.norm
        return scaling

    def unscaled(self) -> Tensor:
        """Which have no factors yet, bool ``(B,)``."""
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
        """Starts of one kind."""
        kinds = torch.full_like(sample_index, KINDS.index(kind))
        return cls(sample_index, points, distances, streams, kinds, torch.full_like(distances, _HOPE))

    @classmethod
    def join(cls, parts: Sequence[SearchState]) -> SearchState:
        """All starts of several that had no region solved."""
        streams = [one for part in parts for one in part.streams]
        columns = [(part.sample_index, part.points, part.distances, part.kinds, part.hopes) for part in parts]
        samples, points, distances, kinds, hopes = map(torch.cat, zip(*columns, strict=True))
        return cls(samples, points, distances, streams, kinds, hopes)

    def select(self, rows: Tensor) -> SearchState:
        """Those of these indices, int64."""
        streams = [self.streams[row] for row in rows.tolist()]
        warm = None if self.warm is None else self.warm.select(rows)
        samples, points, distances = self.sample_index[rows], self.points[rows], self.distances[rows]
        return SearchState(samples, points, distances, streams, self.kinds[rows], self.hopes[rows], warm)

    def update(self, rows: Tensor, latest: SearchState) -> None:
        """Put back starts of these indices, int64, after they were searched from; what they hope for fades."""
        gained = 1 - latest.distances / self.distances[rows]
        self.hopes[rows] = torch.maximum(gained, self.hopes[rows] * _FADING)
        self.points[rows], self.distances[rows] = latest.points, latest.distances
        if self.warm is not None and latest.warm is not None:
            self.warm.update(rows, latest.warm)

    def promising(self, most: int, open_samples: Tensor) -> Tensor:
        """Indices of the ``most`` starts of each input that is open, bool ``(N,)``, that may become the nearest."""
        order = (self.distances * (1 - self.hopes)).argsort(stable=True)
        order = order[torch.isfinite(self.distances[order])]
        order = order[self.sample_index[order].argsort(stable=True)]
        samples = self.sample_index[order]
        place = torch.arange(len(samples), device=samples.device) - torch.searchsorted(samples, samples)
        return order[(place < most) & open_samples[samples]].sort().values
