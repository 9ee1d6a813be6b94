"""Proximal steps for l1: Adam on the margin, and a threshold that makes the perturbation sparse, weighted by a dual.

The first steps change every value, so they reach points that descents from the input do not; the threshold rises while
the point is adversarial and falls while it is not.

Source: Matyasko and Chau, "PDPGD: Primal-dual proximal gradient descent adversarial attack" (2021), algorithm 1, with
its smooth loss of the margin. Its proximal operator in the metric of Adam divides the threshold by the scale of each
value's gradient; here that is bounded, so that values with small gradients are not set to 0 at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.stepping import Going, Nearest

# The last length of a step, as a share of the first.
_LAST = 0.01
# Averages of Adam.
_MEAN, _SQUARE = 0.9, 0.999
# First logarithm of the weight of the margin, relative to that of the distance, its largest size, first and last change
# in a step, and the share of the weights that is kept from step to step.
_WEIGHT, _LARGEST, _CHANGE, _KEPT = math.log(100), math.log(1e6), (0.1, 0.01), 0.9
# How many times that of the largest gradient the threshold of a value is at most.
_THRESHOLD = 5.0


def proximal_steps(
    oracle: BoundaryOracle,
    points: Tensor,
    sample_index: Tensor,
    *,
    steps: int,
    going: Going,
    aims: Tensor | None = None,
    length: float = 0.3,
) -> tuple[Tensor, Tensor]:
    """Step from points ``(B, ...)``, and return the nearest adversarial ones that were met, with their distances.

    The arguments and what is returned are those of :func:`~robust_ext.attacks.linear_region.fab.fab_steps`. The first
    step changes each value by the share ``length`` of the range of the bounds.
    """
    low, high = oracle.threat_model.bounds
    met = Nearest(points)
    rows, inputs = torch.arange(len(points), device=points.device), oracle.inputs[sample_index].flatten(1)
    offsets = points.flatten(1) - inputs
    mean, square = torch.zeros_like(offsets), torch.zeros_like(offsets)
    weight = torch.full_like(offsets[:, :1], _WEIGHT)
    kept = weight.sigmoid()
    for number in range(steps):
        open_rows = going(sample_index[rows])
        if not bool(open_rows.all()):
            state = (rows, inputs, offsets, mean, square, weight, kept)
            rows, inputs, offsets, mean, square, weight, kept = (part[open_rows] for part in state)
        if len(rows) == 0:
            break
        here, samples = (inputs + offsets).view(len(rows), *points.shape[1:]), sample_index[rows]
        margin, gradient, good = oracle.linearised(here, samples, None if aims is None else aims[rows])
        met.offer(rows, here, oracle.distances(here, samples), good)
        margin = margin.nan_to_num(0, 0, 0)[:, None]
        gradient = gradient.nan_to_num(0, 0, 0) * (-margin).sigmoid()
        mean = torch.lerp(gradient, mean, _MEAN)
        square = torch.lerp(gradient.square(), square, _SQUARE)
        scale = (square / (1 - _SQUARE ** (number + 1))).sqrt().clamp_min(1e-12)
        shorter = length * _LAST ** (number / steps)
        step = shorter * (high - low) / (1 - _MEAN ** (number + 1)) * mean / scale
        offsets = (inputs + offsets + step).clamp_(low, high) - inputs
        threshold = torch.minimum(1 / scale, _THRESHOLD / scale.amax(1, keepdim=True)) * shorter * (1 - kept) / kept
        offsets = offsets.sign() * (offsets.abs() - threshold).clamp_min_(0)
        change = _CHANGE[1] + (_CHANGE[0] - _CHANGE[1]) * (1 - number / steps)
        weight = (weight - torch.where(good[:, None], change, -change)).clamp_(-_LARGEST, _LARGEST)
        kept = torch.lerp(weight.sigmoid(), kept, _KEPT)
    return met.points, met.distances
