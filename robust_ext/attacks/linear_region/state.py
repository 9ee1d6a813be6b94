"""The starts of a linear-region attack that are still searched from, and where their solver begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.regions import Regions
from robust_ext.attacks.linear_region.solver.constraints import Constraints
from robust_ext.attacks.linear_region.solver.problem import Scaling, estimate_scaling

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
    """The starts that are still searched from, a row each, with the input each belongs to, int64 ``(B,)``.

    The points ``(B, ...)`` are the nearest adversarial ones, the distances float64; each start has a CPU generator.
    """

    sample_index: Tensor
    points: Tensor
    distances: Tensor
    streams: list[torch.Generator]
    warm: WarmStart | None = None

    def select(self, rows: Tensor) -> SearchState:
        """Those of these indices, int64."""
        streams = [self.streams[row] for row in rows.tolist()]
        warm = None if self.warm is None else self.warm.select(rows)
        return SearchState(self.sample_index[rows], self.points[rows], self.distances[rows], streams, warm)

    def nearest(self, most: int, open_samples: Tensor) -> SearchState:
        """The ``most`` nearest of each input that is still open, bool ``(N,)``."""
        order = self.distances.argsort(stable=True)
        order = order[self.sample_index[order].argsort(stable=True)]
        samples = self.sample_index[order]
        place = torch.arange(len(samples), device=samples.device) - torch.searchsorted(samples, samples)
        rows = order[(place < most) & open_samples[samples]].sort().values
        return self if len(rows) == len(self.sample_index) else self.select(rows)
