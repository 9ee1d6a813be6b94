"""Local intrinsic dimensionality by its maximum likelihood estimate."""

from __future__ import annotations

import torch
from torch import Tensor

# The estimate where all neighbours are equally far, which is infinite by the formula.
LARGEST = 1e4
# Distances below this share of a point's norm are rounding.
_ROUNDING = 1e-5


def local_dimension(points: Tensor, references: Tensor, *, neighbours: int) -> Tensor:
    """Local intrinsic dimensionality of points among references, with gradients for the points.

    With ``r_1 <= ... <= r_k`` the distances to the k nearest references, it is ``-k / sum_j log(r_j / r_k)``
    (Amsaleg et al. 2015; Ma et al. 2018, equation 4). A reference at no distance, up to rounding, is the point itself,
    and not one of its neighbours: it would make the estimate 0. Where fewer than k others are left, k is their number.

    Args:
        points: ``(N, F)``.
        references: ``(R, F)``, R of at least ``neighbours``.
        neighbours: k, at least 2.

    Returns:
        ``(N,)``, in [0, 10000]: 0 where fewer than two references are elsewhere than the point, and at most 10000
        where all neighbours are equally far.

    Example:
        >>> line = torch.linspace(0, 1, 101)[:, None]
        >>> round(float(local_dimension(torch.tensor([[0.503]]), line, neighbours=50)), 1)
        1.0
    """
    distances = torch.cdist(points, references, compute_mode="donot_use_mm_for_euclid_dist")
    itself = distances <= _ROUNDING * points.detach().norm(dim=1, keepdim=True)
    nearest = distances.masked_fill(itself, torch.inf).topk(neighbours, dim=1, largest=False).values
    count = (~itself).sum(1).clamp_max(neighbours)
    there = torch.arange(neighbours, device=points.device) < count[:, None]
    # Absent neighbours are taken out before the logarithm, whose gradient they would make NaN.
    nearest = torch.where(there, nearest, torch.ones_like(nearest))
    farthest = nearest.gather(1, (count - 1).clamp_min(0)[:, None])
    logs = torch.where(there, (nearest / farthest).log(), torch.zeros_like(nearest)).sum(1)
    found = count / (-logs).clamp_min(count.clamp_min(1) / LARGEST)
    return torch.where(count > 1, found, torch.zeros_like(found))
