"""Steps that each solve the problem of the linearised boundary, in a small box around the point.

The projections of :mod:`robust_ext.attacks.linear_region.fab` go as far as they have to, beyond where the linearisation
holds. In a box, steps reach the nearest point on the boundary's inner side, to the digits that the last box allows. The
nearest point often lies where regions meet, each with its own gradient, so steps follow an average of the gradients so
far.

Source: Brendel et al., "Accurate, reliable and fast robustness evaluation" (2019), section 2, for steps that minimise
the distance on the linearised boundary within a trust region; its code averages gradients too. Different from it: the
region is a box, in which the problem has a closed form, and its size falls geometrically.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.fab import project_beyond_plane
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.stepping import Going, Linearised, Steps, followed

# Half the width of the first and the last box: in l1, where few values change by much, as shares of the range of the
# bounds; of the largest change of a value in linf, and of the root of the mean square of all in l2.
_RADIUS = {"linf": (0.3, 0.01), "l2": (0.15, 0.003), "l1": (0.05, 0.001)}
# How much of the average of gradients is kept in each step.
_KEPT = 0.8
# How far beyond the plane is aimed, as a share of the width of the box along its normal.
_BEYOND = 2e-3
# Values whose gradients are smaller than that, relative to the largest, stay.
_LEAST = 1e-6


def trust_region_steps(
    oracle: BoundaryOracle,
    points: Tensor,
    sample_index: Tensor,
    *,
    steps: int,
    going: Going,
    aims: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step from points and return the nearest, like :func:`~robust_ext.attacks.linear_region.fab.fab_steps`."""
    norm, bounds = oracle.threat_model.norm, oracle.threat_model.bounds
    first, last = _RADIUS[norm]

    def step(number: int, at: Linearised, average: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        radius = scale * first * (last / first) ** (number / max(1, steps - 1))
        size = at.gradients.norm(dim=1, keepdim=True).clamp_min(torch.finfo(at.gradients.dtype).tiny)
        unit = at.gradients / size
        average = torch.lerp(unit, average, _KEPT) if number else unit
        beyond = _BEYOND * radius * average.norm(dim=1, keepdim=True) - at.margins[:, None] / size
        heights = (average * at.points).sum(1) + beyond.squeeze(1)
        return (
            nearest_in_box(norm, at.points, at.inputs, average, heights, radius=radius, bounds=bounds),
            average,
            scale,
        )

    start, inputs = points.flatten(1), oracle.inputs[sample_index].flatten(1)
    width = torch.full_like(start[:, :1], bounds[1] - bounds[0])
    largest, mean_square = (start - inputs).abs().amax(1, keepdim=True), (start - inputs).square().mean(1, keepdim=True)
    scale = {"linf": largest, "l2": mean_square.sqrt(), "l1": width}[norm]
    state = (start, torch.zeros_like(start), scale)
    return followed(oracle, state, sample_index, step, steps=steps, going=going, aims=aims, classify_last=True)


def then_trust_region(
    oracle: BoundaryOracle,
    points: Tensor,
    sample_index: Tensor,
    *,
    steps: int,
    going: Going,
    aims: Tensor | None = None,
    first: Steps,
    last: int,
    norm: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Take all but the ``last`` steps by ``first``, and these in the trust region from the nearest point of the others.

    The ``first`` steps use ``norm``, if given, also for what is nearest. The rest is that of
    :func:`~robust_ext.attacks.linear_region.fab.fab_steps`.
    """
    begun = oracle if norm is None else oracle.in_norm(norm)
    reached, _ = first(begun, points, sample_index, steps=steps - last, going=going, aims=aims)
    return trust_region_steps(oracle, reached, sample_index, steps=last, going=going, aims=aims)


def nearest_in_box(
    norm: str,
    points: Tensor,
    inputs: Tensor,
    normals: Tensor,
    heights: Tensor,
    *,
    radius: Tensor,
    bounds: tuple[float, float],
) -> Tensor:
    """Minimise ``||z - inputs||`` with ``normals . z >= heights``, ``|z - points| <= radius`` and z in the bounds.

    Points and inputs, in bounds, and normals are ``(B, D)``, heights ``(B,)``, radii ``(B, 1)``. Where no such point
    lies beyond the plane, the one that comes closest to it is returned.
    """
    low, high = (points - radius).clamp_min(bounds[0]), (points + radius).clamp_max(bounds[1])
    nearest = inputs.clamp(low, high)
    if norm == "l1":
        # From there on, each value costs what it moves.
        return project_beyond_plane("l1", nearest, normals, heights, bounds=(low, high))
    # Each value is the input's moved by t * pace, kept in the box: it sets out where that enters the box, and stops
    # where it leaves. In between the gain of all is linear in t.
    size, way = normals.abs(), normals.sign()
    moves = size > _LEAST * size.amax(1, keepdim=True)
    pace = torch.where(moves, size if norm == "l2" else 1.0, 0.0)
    room = torch.where(moves, (torch.where(normals > 0, high, low) - nearest) * way, 0)
    wait = torch.where(moves, (nearest - inputs) * way, 0).clamp_min_(0)
    need = (heights - (normals * nearest).sum(1)).clamp_min_(0).unsqueeze(1)
    tiny = torch.finfo(size.dtype).tiny
    times, order = (torch.cat([wait, wait + room], 1) / pace.repeat(1, 2).clamp_min(tiny)).sort(1)
    slopes = torch.cat([size * pace, -size * pace], 1).gather(1, order).cumsum(1).clamp_min_(0)
    gains = torch.cat([torch.zeros_like(need), (slopes[:, :-1] * times.diff()).cumsum(1)], 1)
    piece = ((gains < need).sum(1, keepdim=True) - 1).clamp_min_(0)
    begin, gained, slope = (part.gather(1, piece) for part in (times, gains, slopes))
    time = begin + (need - gained) / slope.clamp_min(tiny)
    moved = torch.minimum((time * pace - wait).clamp_min_(0), room)
    return torch.clamp(nearest + moved * way, low, high)
