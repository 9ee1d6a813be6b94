"""The points of a problem: inner points, and candidates among which those farthest from them are planted.

Zimmermann et al. 2022, section 3.1 and appendix B, draw inner points uniformly and plant the first point drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robust_ext.core.random import derive_seed
from robust_ext.core.sampling import evenly_mixed
from robust_ext.evaluations.binarization.settings import BinarizationSettings

# Of the mean variance of the features: added to each, so that directions in which nothing varies do not decide.
_FLOOR = 1e-3


def draw_candidates(inputs: Tensor, samples: Sequence[int], settings: BinarizationSettings) -> Tensor:
    """The candidates for planting of B samples, ``(B, n, ...)``: that many for each of N_b."""
    draw = settings.threat_model.sample_corners if settings.corners else settings.threat_model.sample_surface
    count = settings.boundary_points * settings.planted_candidates
    return draw(inputs, count, key=keys_of(samples, settings, "boundary"))


def draw_inner(
    inputs: Tensor, samples: Sequence[int], settings: BinarizationSettings, count: int, *, start: int = 0
) -> Tensor:
    """The inner points ``start`` to ``start + count`` of B samples, ``(B, count, ...)``, the two kinds evenly mixed."""
    ball, radius = settings.threat_model, 1 - settings.gap
    corners, inner = (keys_of(samples, settings, purpose) for purpose in ("inner corners", "inner"))
    return evenly_mixed(
        settings.inner_corners,
        count,
        start,
        lambda size, first: ball.sample_corners(inputs, size, key=corners, start=first, radius=radius),
        lambda size, first: ball.sample_inner(inputs, size, key=inner, start=first, radius=radius),
    )


def keys_of(samples: Sequence[int], settings: BinarizationSettings, purpose: str) -> list[int]:
    """The key of each sample's points for a purpose."""
    return [derive_seed(settings.seed_of_judge, sample, purpose) for sample in samples]


def farthest(inner: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Return the candidates to plant: of each of ``count`` equal parts, the one farthest from the inner points.

    Among points drawn alike, a readout can tell one only as far as it lies outside the others, which a random one does
    not where features vary in few directions; random points then solve its problem. The distance is that of
    Mahalanobis, by the inner points' own covariance: the standard deviations between them and the point, along
    the direction where these are most.

    Args:
        inner: Features of inner points of B samples, ``(B, n, *F)``.
        candidates: Features of candidates, ``(B, m, *F)``, m of at least ``count``.
        count: How many to choose.

    Returns:
        Indices, int64 ``(B, count)``, in ascending order, on the features' device; it is not waited for.
    """
    problems, total = candidates.shape[:2]
    parts = torch.arange(total, device=candidates.device).tensor_split(count)
    if total == count:
        return torch.cat(parts).expand(problems, count)
    rows = inner.flatten(2).double()
    centre = rows.mean(1, keepdim=True)
    rows, points = rows - centre, candidates.flatten(2).double() - centre
    floor = _FLOOR * rows.square().mean((1, 2))
    # Where nothing varies at all, what is far is far in any measure.
    floor = torch.where(floor == 0, 1.0, floor)
    if rows.shape[2] <= rows.shape[1]:
        squared = (points * _solved(rows.mT @ rows / rows.shape[1], floor, points)).sum(2)
    else:
        # The same by the matrix of scalar products, which is smaller where features are many (Woodbury's identity).
        along = points @ rows.mT
        squared = points.square().sum(2) - (along * _solved(rows @ rows.mT, rows.shape[1] * floor, along)).sum(2)
        squared = squared / floor[:, None]
    columns = zip(parts, squared.tensor_split(count, 1), strict=True)
    return torch.stack([part[distances.argmax(1)] for part, distances in columns], 1)


def _solved(matrix: Tensor, floor: Tensor, points: Tensor) -> Tensor:
    """``points`` ``(B, m, D)`` times the inverse of ``matrix + floor``, with ``floor`` ``(B,)`` on its diagonal."""
    matrix.diagonal(dim1=1, dim2=2).add_(floor[:, None])
    # Positive definite by the floor; whether it is would have to be waited for.
    lower, _ = torch.linalg.cholesky_ex(matrix)
    return torch.cholesky_solve(points.mT, lower).mT
