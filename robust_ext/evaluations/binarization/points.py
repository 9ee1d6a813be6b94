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


def farthest(inner: Tensor, candidates: Tensor, count: int) -> list[int]:
    """Which of the candidates to plant: of each of ``count`` equal parts, the one farthest from the inner points.

    Among points drawn alike, a readout can tell one only as far as it lies outside the others, which a random one does
    not where features vary in few directions; random points then solve its problem. The distance is that of
    Mahalanobis, by the inner points' own covariance: so many standard deviations lie between them and the point, along
    the direction where these are most.

    Args:
        inner: Features of inner points, ``(n, *F)``.
        candidates: Features of candidates, ``(m, *F)``, m of at least ``count``.
        count: How many to choose.

    Returns:
        Indices, in ascending order.
    """
    parts = torch.arange(len(candidates)).tensor_split(count)
    if len(candidates) == count:
        return torch.cat(parts).tolist()
    rows = inner.flatten(1).double()
    centre = rows.mean(0)
    rows, points = rows - centre, candidates.flatten(1).double() - centre
    # Where nothing varies at all, what is far is far in any measure.
    floor = _FLOOR * float(rows.square().mean()) or 1.0
    squared = points.square().sum(1) / floor
    if rows.shape[1] <= len(rows):
        matrix = rows.mT @ rows / len(rows)
        matrix.diagonal().add_(floor)
        squared = (points * torch.linalg.solve(matrix, points.mT).mT).sum(1)
    else:
        # The same by the matrix of scalar products, which is smaller where features are many (Woodbury's identity).
        matrix, along = rows @ rows.mT, points @ rows.mT
        matrix.diagonal().add_(len(rows) * floor)
        squared = squared - (along * torch.linalg.solve(matrix, along.mT).mT).sum(1) / floor
    distances = squared.cpu()
    return [int(part[distances[part].argmax()]) for part in parts]
