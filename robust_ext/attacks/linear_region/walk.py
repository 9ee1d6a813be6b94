"""A walk along the decision boundary towards the input, which looks at the decision row of a region only.

It is cheap, one pass forward and one back for a step, and brings far starts near before regions are solved.

Source: Croce and Hein, "Minimally distorted adversarial examples with a fast adaptive boundary attack" (2020), section
3, without its backward step; the weight of the input falls from step to step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.judge import Judge
from robust_ext.attacks.linear_region.planes import nearest_beyond

# Weights of the input's own projection in the first and the last step.
_FIRST, _LAST = 0.5, 0.05
# How far beyond the plane is aimed, as a share of the distance.
_BEYOND = 2e-3


def walk(
    judge: Judge, points: Tensor, owners: Tensor, *, steps: int, running: Callable[[], bool]
) -> tuple[Tensor, Tensor]:
    """Walk from points, adversarial or not, and keep the nearest adversarial one of each.

    Args:
        judge: Asks the network.
        points: ``(B, ...)`` in bounds.
        owners: The inputs they belong to, int64 ``(B,)``.
        steps: How many; one more forward pass judges the last point.
        running: Asked before each step; the walk ends when it says False.

    Returns:
        Points ``(B, ...)`` and their distances, float64 ``(B,)``; infinite where none was adversarial.
    """
    inputs, bounds, norm = judge.inputs[owners].flatten(1), judge.threat_model.bounds, judge.threat_model.norm
    best, here = points.clone(), points
    nearest = torch.full((len(points),), torch.inf, dtype=torch.float64, device=points.device)
    shape = (-1, *[1] * (points.dim() - 1))
    for number in range(steps + 1):
        if number == steps or not running():
            good = judge.adversarial(here, owners)
        else:
            margin, gradient, good = judge.linearised(here, owners)
        distance = judge.distances(here, owners)
        better = good & (distance < nearest)
        best = torch.where(better.view(shape), here, best)
        nearest = torch.where(better, distance, nearest)
        if number == steps or not running():
            break
        weight = float(_FIRST * (_LAST / _FIRST) ** (number / max(1, steps - 1)))
        flat, gradient = here.flatten(1), gradient.nan_to_num(0, 0, 0)
        reach = torch.linalg.vector_norm(gradient, dim=1) * (flat - inputs).norm(dim=1)
        heights = (gradient * flat).sum(1) - margin.nan_to_num(0, 0, 0) + _BEYOND * reach
        near = nearest_beyond(norm, flat, gradient, heights, bounds=bounds)
        aim = nearest_beyond(norm, inputs, gradient, heights, bounds=bounds)
        here = torch.lerp(near, aim, weight).view_as(points)
    return best, nearest
