"""Steepest ascent of the margin in a ball that shrinks while the point is adversarial, and grows while it is not.

Sources: Rony et al., "Decoupling direction and norm for efficient gradient-based l2 adversarial attacks and defenses"
(2019), algorithm 1, for the ball; Pintor et al., "Fast minimum-norm adversarial attacks through adaptive norm
constraints" (2021), section 2, for its first radius and the falling rates. Different from both: the margin is
climbed, along the gradient's sign in linf, once a point is known the ball stays inside its distance, and the first
steps in l2 are longer. In l1, :mod:`robust_ext.attacks.linear_region.proximal` takes their place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.stepping import Going, Linearised, followed

# First and last share by which the ball changes from step to step.
_CHANGE = {"linf": (0.1, 0.001), "l2": (0.3, 0.001)}
# Lengths of the first and the last step, as multiples of the radius. In l2 the first ones turn the perturbation nearly
# into the gradient, which leads to nearer points than shorter ones do.
_LENGTH = {"linf": (1.0, 0.01), "l2": (5.0, 0.01)}
# The same near a known point.
_STEADY, _SHORT = (0.01, 0.01), (0.25, 0.01)


def descent_steps(
    oracle: BoundaryOracle,
    points: Tensor,
    sample_index: Tensor,
    *,
    steps: int,
    going: Going,
    aims: Tensor | None = None,
    limits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step from points and return the nearest, like :func:`~robust_ext.attacks.linear_region.fab.fab_steps`.

    With ``limits``, float64 ``(B,)``, steps are short, in balls that begin just below these distances.
    """
    norm, bounds = oracle.threat_model.norm, oracle.threat_model.bounds
    inputs = oracle.inputs[sample_index].flatten(1)
    offsets, radius = points.flatten(1) - inputs, torch.zeros_like(inputs[:, :1])
    lengths, changes = (_LENGTH[norm], _CHANGE[norm]) if limits is None else (_SHORT, _STEADY)
    if limits is not None:
        radius = limits.to(inputs)[:, None] * (1 - changes[0])
        offsets = _inside(norm, offsets, inputs, radius, bounds)

    def step(number: int, at: Linearised, offsets: Tensor, radius: Tensor) -> tuple[Tensor, ...]:
        falling = (1 + math.cos(math.pi * number / max(1, steps - 1))) / 2
        change, length = (last + (first - last) * falling for first, last in (changes, lengths))
        good, own = at.adversarial[:, None], at.distances.to(offsets)[:, None]
        smaller = torch.minimum(radius, own) * (1 - change)
        if limits is not None:
            radius = torch.where(good, smaller, radius)
        elif number == 0:
            radius = own + torch.where(good, 0, at.margins.abs()[:, None] / _dual_norm(norm, at.gradients))
        else:
            known = at.nearest.to(offsets)[:, None]
            radius = torch.where(good, smaller, torch.minimum(radius * (1 + change), known))
        offsets = _inside(norm, offsets + length * _direction(norm, at.gradients, radius), at.inputs, radius, bounds)
        return at.inputs + offsets, offsets, radius

    start = (inputs + offsets, offsets, radius)
    return followed(oracle, start, sample_index, step, steps=steps, going=going, aims=aims)


def _direction(norm: str, gradient: Tensor, radius: Tensor) -> Tensor:
    """Return the longest step ``(B, D)``."""
    if norm == "linf":
        return gradient.sign() * radius
    size = gradient.norm(dim=1, keepdim=True).clamp_min(torch.finfo(gradient.dtype).tiny)
    longest: Tensor = gradient / size * radius
    return longest


def _dual_norm(norm: str, gradient: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(gradient, ord=1 if norm == "linf" else 2, dim=1, keepdim=True)
    return size.clamp_min(torch.finfo(gradient.dtype).tiny ** 0.5)


def _inside(norm: str, offsets: Tensor, inputs: Tensor, radius: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Project offsets ``(B, D)`` into balls of a radius ``(B, 1)`` each, and into the bounds."""
    room = torch.where(offsets > 0, bounds[1] - inputs, inputs - bounds[0]).clamp_min_(0)
    size = offsets.abs()
    if norm == "linf":
        size = torch.minimum(size, radius)
    else:
        length = size.norm(dim=1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
        size = size * (radius / length).clamp_max(1)
    return torch.minimum(size, room) * offsets.sign()
