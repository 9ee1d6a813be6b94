"""Where the solver begins: a sampled region is a neighbour of the last, and so is its solution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.regions import Regions
from robust_ext.attacks.linear_region.solver.constraints import Constraints
from robust_ext.attacks.linear_region.solver.scaling import Scaling, estimate_scaling

# Products for the factors of the rows, which need not be exact.
PROBES, POWER = 4, 4


@dataclass
class Memory:
    """What the last region of each runner says about the next, which is a neighbour: where its solver may begin.

    Args:
        anchors: Points of these regions, ``(B, ...)``.
        multipliers: Of their constraints, at least 0, bfloat16 ``(B, M)``; zeros where there was none. A start need not
            be exact, and a large network has many rows.
        scaling: Factors of their rows, bfloat16; a norm of 0 where there was none.
    """

    anchors: Tensor
    multipliers: Tensor
    scaling: Scaling

    @classmethod
    def blank(cls, points: Tensor, constraints: int) -> Memory:
        """That of runners which solved no region yet."""
        multipliers = points.new_zeros(len(points), constraints, dtype=torch.bfloat16)
        scaling = Scaling(rows=torch.ones_like(multipliers), norm=points.new_zeros(len(points)))
        return cls(points.clone(), multipliers, scaling)

    def select(self, rows: Tensor) -> Memory:
        """That of these indices, int64."""
        return Memory(self.anchors[rows], self.multipliers[rows], self.scaling.select(rows))

    def update(self, rows: Tensor, learnt: Memory) -> None:
        """Take over what the runners of these indices learnt, of any dtype; the last, where one is named repeatedly."""
        last = {row: place for place, row in enumerate(rows.tolist())}
        rows = torch.tensor(list(last), dtype=torch.int64, device=rows.device)
        places = torch.tensor(list(last.values()), dtype=torch.int64, device=rows.device)
        self.anchors[rows] = learnt.anchors[places]
        self.multipliers[rows] = learnt.multipliers[places].to(torch.bfloat16)
        self.scaling.rows[rows] = learnt.scaling.rows[places].to(torch.bfloat16)
        self.scaling.norm[rows] = learnt.scaling.norm[places]

    def begin(self, regions: Regions, before: Regions) -> Tensor:
        """Multipliers to begin with in other regions ``(B, M)``: 0 where a constraint no longer means the same.

        Args:
            regions: Where they are wanted.
            before: Those of the anchors.
        """
        multipliers = self.multipliers.to(regions.dtype)
        multipliers[:, : regions.constraints] *= regions.agrees(before)
        return multipliers

    def factors(self, constraints: Constraints, inputs: Tensor, *, generator: torch.Generator) -> Scaling:
        """The factors that are known, or new ones where there are none; :meth:`unknown` says where."""
        rows = self.unknown().nonzero().flatten()
        scaling = Scaling(rows=self.scaling.rows.to(inputs), norm=self.scaling.norm.clone())
        if len(rows) == 0:
            return scaling
        fresh = estimate_scaling(
            constraints.select(rows), inputs[rows], generator=generator, probes=PROBES, power_iterations=POWER
        )
        scaling.rows[rows], scaling.norm[rows] = fresh.rows, fresh.norm
        return scaling

    def unknown(self) -> Tensor:
        """Which runners have no factors yet, bool ``(B,)``."""
        return self.scaling.norm == 0
