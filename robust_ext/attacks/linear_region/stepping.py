"""What all steps towards nearer points have in common: the nearest they met, and whether it becomes a start's point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.state import SearchState

# Whether there may be steps from points, bool (B,), by the inputs they belong to, int64 (B,).
Going = Callable[[Tensor], Tensor]
# The share of the perturbation that is kept in the bisection to the input after steps, and how much farther than before
# they may have ended for that to be tried.
_LEAST, _WORTH = 0.9, 1.01


class Nearest:
    """The nearest adversarial points that steps from points ``(B, ...)`` have met, and their distances ``(B,)``."""

    def __init__(self, points: Tensor) -> None:
        self.points = points.clone()
        self.distances = torch.full((len(points),), torch.inf, dtype=torch.float64, device=points.device)

    def offer(self, rows: Tensor, points: Tensor, distances: Tensor, adversarial: Tensor) -> None:
        """Keep what is nearer of points of these indices, int64."""
        better = adversarial & (distances < self.distances[rows])
        self.points[rows[better]], self.distances[rows[better]] = points[better], distances[better]


# Steps from points: :func:`fab_steps` or :func:`descent_steps`.
Steps = Callable[..., tuple[Tensor, Tensor]]


def stepped(
    oracle: BoundaryOracle,
    state: SearchState,
    away: Tensor,
    take: Steps,
    *,
    steps: int,
    going: Going,
    batch: int,
    **more: Tensor | None,
) -> SearchState:
    """The starts after steps from points ``away (B, ...)``, or where they were; so many points at once.

    ``more`` are further arguments of the steps, ``(B,)`` each.
    """
    points, distances, samples = state.points.clone(), state.distances.clone(), state.sample_index
    for rows in torch.split(torch.arange(len(samples), device=samples.device), batch):
        chosen = {name: value[rows] for name, value in more.items() if value is not None}
        reached, lengths = take(oracle, away[rows], samples[rows], steps=steps, going=going, **chosen)
        good = torch.isfinite(lengths) & (lengths < distances[rows] * _WORTH)
        rows = rows[good]
        moved = oracle.bisect_to_input(reached[good], samples[rows], least=_LEAST)
        lengths = oracle.distances(moved, samples[rows])
        nearer = lengths < distances[rows]
        points[rows[nearer]], distances[rows[nearer]] = moved[nearer], lengths[nearer]
    return replace(state, points=points, distances=distances)
