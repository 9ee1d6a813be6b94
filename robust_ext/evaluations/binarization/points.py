"""The points of a problem: inner points, and candidates among which those farthest from them are planted.

Zimmermann et al. 2022, section 3.1 and appendix B, draw inner points uniformly and plant the first point drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from robust_ext.core.random import stream
from robust_ext.evaluations.binarization.settings import BinarizationSettings

# Points are drawn in blocks with a stream of their own, so that the first n do not depend on how many follow.
_BLOCK = 256
# Of the mean variance of the features: added to each, so that directions in which nothing varies do not decide.
_FLOOR = 1e-3


def draw_candidates(x: Tensor, sample: int, settings: BinarizationSettings) -> Tensor:
    """The points of a sample among which those to be planted are chosen, ``(n, ...)``: so many for each of N_b."""
    draw = settings.threat_model.sample_corners if settings.corners else settings.threat_model.sample_surface
    key, count = (settings.seed_of_judge, sample, "boundary"), settings.boundary_points * settings.planted_candidates
    return torch.cat([draw(x, size, generator=stream(*key, block)) for block, size in _blocks(count)])


def draw_inner(x: Tensor, sample: int, settings: BinarizationSettings, count: int) -> Tensor:
    """The first ``count`` inner points of a sample, ``(count, ...)``."""
    return torch.cat([draw() for draw in inner_blocks(x, sample, settings, count)])


def inner_blocks(x: Tensor, sample: int, settings: BinarizationSettings, count: int) -> Iterator[Callable[[], Tensor]]:
    """Functions that draw the blocks of a sample's inner points."""
    for block, size in _blocks(count):
        yield partial(_draw_block, x, sample, settings, block, size)


def _draw_block(x: Tensor, sample: int, settings: BinarizationSettings, block: int, size: int) -> Tensor:
    """The first ``size`` points of a block, the two kinds evenly mixed: of the first n, a share n are corners."""
    ball, radius, key = settings.threat_model, 1 - settings.gap, (settings.seed_of_judge, sample)
    corner = _evenly(settings.inner_corners, block * _BLOCK, size)
    corners, uniform = int(corner.sum()), int((~corner).sum())
    points = x.new_empty((size, *x.shape), dtype=torch.float32)
    points[corner] = ball.sample_corners(x, corners, generator=stream(*key, "inner corners", block), radius=radius)
    points[~corner] = ball.sample_inner(x, uniform, generator=stream(*key, "inner", block), radius=radius)
    return points


def _evenly(share: float, start: int, count: int) -> Tensor:
    """Which of the points ``start`` to ``start + count`` are of the first kind, bool: evenly spread."""
    upto = (torch.arange(start, start + count + 1, dtype=torch.float64) * share).floor()
    return upto.diff() > 0


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    """``(index, size)`` of the blocks that make up ``count`` points."""
    for block in range(-(-count // _BLOCK)):
        yield block, min(_BLOCK, count - block * _BLOCK)


def farthest(inner: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Which of the candidates to plant: of each of ``count`` equal parts, the one farthest from the inner points.

    Among points drawn alike, a readout can tell one only as far as it lies outside the others, which a random one does
    not where features vary in few directions; random points then solve its problem. The distance is that of
    Mahalanobis, by the inner points' own covariance: so many standard deviations lie between them and the point, along
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
