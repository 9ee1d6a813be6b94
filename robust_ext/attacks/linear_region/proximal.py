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
from robust_ext.attacks.linear_region.stepping import Going, Linearised, followed

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
    """Step from points and return the nearest, like :func:`~robust_ext.attacks.linear_region.fab.fab_steps`.

    The first step changes each value by the share ``length`` of the range of the bounds.
    """
    low, high = oracle.threat_model.bounds
    inputs = oracle.inputs[sample_index].flatten(1)
    offsets = points.flatten(1) - inputs
    weight = torch.full_like(offsets[:, :1], _WEIGHT)

    def step(
        number: int, at: Linearised, offsets: Tensor, mean: Tensor, square: Tensor, weight: Tensor, kept: Tensor
    ) -> tuple[Tensor, ...]:
        gradient = at.gradients * (-at.margins[:, None]).sigmoid()
        mean = torch.lerp(gradient, mean, _MEAN)
        square = torch.lerp(gradient.square(), square, _SQUARE)
        scale = (square / (1 - _SQUARE ** (number + 1))).sqrt().clamp_min(1e-12)
        shorter = length * _LAST ** (number / steps)
        moved = shorter * (high - low) / (1 - _MEAN ** (number + 1)) * mean / scale
        offsets = (at.inputs + offsets + moved).clamp_(low, high) - at.inputs
        threshold = torch.minimum(1 / scale, _THRESHOLD / scale.amax(1, keepdim=True)) * shorter * (1 - kept) / kept
        offsets = offsets.sign() * (offsets.abs() - threshold).clamp_min_(0)
        change = _CHANGE[1] + (_CHANGE[0] - _CHANGE[1]) * (1 - number / steps)
        weight = (weight - torch.where(at.adversarial[:, None], change, -change)).clamp_(-_LARGEST, _LARGEST)
        kept = torch.lerp(weight.sigmoid(), kept, _KEPT)
        return at.inputs + offsets, offsets, mean, square, weight, kept

    blank = torch.zeros_like(offsets)
    start = (inputs + offsets, offsets, blank, blank, weight, weight.sigmoid())
    return followed(oracle, start, sample_index, step, steps=steps, going=going, aims=aims)
