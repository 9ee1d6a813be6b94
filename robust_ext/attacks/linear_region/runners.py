"""The starts of a linear-region attack that are still in the race."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.memory import Memory


@dataclass
class Runners:
    """The starts that are still in the race, a row each.

    Args:
        owners: The inputs they belong to, int64 ``(B,)``.
        points: The nearest adversarial point of each, ``(B, ...)``.
        distances: Of these, float64 ``(B,)``.
        streams: A CPU generator for each.
        memory: Of the regions they solved; none before the first.
    """

    owners: Tensor
    points: Tensor
    distances: Tensor
    streams: list[torch.Generator]
    memory: Memory | None = None

    def select(self, rows: Tensor) -> Runners:
        """Those of these indices, int64."""
        chosen = [self.streams[row] for row in rows.tolist()]
        memory = None if self.memory is None else self.memory.select(rows)
        return Runners(self.owners[rows], self.points[rows], self.distances[rows], chosen, memory)

    def ranked(self, most: int, open_inputs: Tensor) -> Runners:
        """The ``most`` nearest of each input that is still open, bool ``(N,)``."""
        order = self.distances.argsort(stable=True)
        order = order[self.owners[order].argsort(stable=True)]
        owners = self.owners[order]
        place = torch.arange(len(owners), device=owners.device) - torch.searchsorted(owners, owners)
        rows = order[(place < most) & open_inputs[owners]].sort().values
        return self if len(rows) == len(self.owners) else self.select(rows)
