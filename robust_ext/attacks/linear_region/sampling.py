"""Points near the best one, in whose regions the search goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def sample_near(
    points: Tensor,
    inputs: Tensor,
    streams: Sequence[torch.Generator],
    *,
    q: float,
    gamma: float,
    bounds: tuple[float, float],
) -> Tensor:
    """Draw a point near each of some points, by equations 12 to 14 of Croce, Rauber and Hein (2019), clipped.

    Args:
        points: ``(B, ...)``, none of which is its input.
        inputs: ``(B, ...)``.
        streams: A CPU generator for each.
        q: Probability of the side of the input.
        gamma: How close to the points.
        bounds: Lowest and highest value.

    Returns:
        ``(B, ...)``.
    """
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
    moved = points.flatten(1) + size * reach**gamma * direction
    clipped: Tensor = moved.clamp_(*bounds).view_as(points)
    return clipped


def jump(
    points: Tensor,
    inputs: Tensor,
    streams: Sequence[torch.Generator],
    *,
    length: float,
    bounds: tuple[float, float],
) -> Tensor:
    """Move each point in a random direction by ``length`` times its perturbation's l2 norm, clipped.

    Arguments as for :func:`sample_near`.
    """
    offsets = (points - inputs).flatten(1)
    drawn = torch.stack([torch.randn(offsets.shape[1], generator=one) for one in streams]).to(offsets)
    drawn *= length * offsets.norm(dim=1, keepdim=True) / drawn.norm(dim=1, keepdim=True).clamp_min_(1e-12)
    return (points.flatten(1) + drawn).clamp_(*bounds).view_as(points)
