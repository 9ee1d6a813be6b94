"""Steps that go to the nearest point on the linearised boundary, of the whole box of inputs or of a trust region.

They are cheap, one pass forward and one back each, and bring far starts near before regions are solved; a basin hop
is a random jump and a few of these steps back.

Sources: Croce and Hein, "Minimally distorted adversarial examples with a fast adaptive boundary attack" (2020), section
3, without its backward step, with the projections of its section 2.2; the weight of the input falls from step to step.
Brendel et al., "Accurate, reliable and fast robustness evaluation" (2019), section 2, for steps that minimise the
distance on the linearised boundary within a trust region; its code averages gradients too. Different from it: the
region is a box, in which the problem has a closed form, and its size falls geometrically.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import room_towards
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.stepping import Linearised, State, Step, Steps

# Weights of the input's own projection in the first and the last step.
_FIRST, _LAST = 0.5, 0.05
# How far beyond the plane is aimed, as a share of the distance or of the width of the box along the normal.
_BEYOND = 2e-3


def _fab(oracle: BoundaryOracle, points: Tensor, inputs: Tensor, *, steps: int) -> tuple[State, Step]:
    norm, bounds = oracle.threat_model.norm, oracle.threat_model.bounds

    def step(number: int, at: Linearised) -> State:
        weight = float(_FIRST * (_LAST / _FIRST) ** (number / max(1, steps - 1)))
        reach = torch.linalg.vector_norm(at.gradients, dim=1) * (at.points - at.inputs).norm(dim=1)
        heights = (at.gradients * at.points).sum(1) - at.margins + _BEYOND * reach
        near = project_beyond_plane(norm, at.points, at.gradients, heights, bounds=bounds)
        aim = project_beyond_plane(norm, at.inputs, at.gradients, heights, bounds=bounds)
        return (torch.lerp(near, aim, weight),)

    return (points,), step


# Projections onto the plane that go as far as they have to, beyond where the linearisation holds.
fab_steps = Steps(_fab, classify_last=True)

# Half the width of the first and the last box: in l1, where few values change by much, as shares of the range of the
# bounds; of the largest change of a value in linf, and of the root of the mean square of all in l2.
_RADIUS = {"linf": (0.3, 0.01), "l2": (0.15, 0.003), "l1": (0.05, 0.001)}
# How much of the average of gradients is kept in each step.
_KEPT = 0.8
# Values whose gradients are smaller than that, relative to the largest, stay.
_LEAST = 1e-6


def _trust_region(oracle: BoundaryOracle, points: Tensor, inputs: Tensor, *, steps: int) -> tuple[State, Step]:
    norm, bounds = oracle.threat_model.norm, oracle.threat_model.bounds
    first, last = _RADIUS[norm]

    def step(number: int, at: Linearised, average: Tensor, scale: Tensor) -> State:
        radius = scale * first * (last / first) ** (number / max(1, steps - 1))
        size = at.gradients.norm(dim=1, keepdim=True).clamp_min(torch.finfo(at.gradients.dtype).tiny)
        unit = at.gradients / size
        average = torch.lerp(unit, average, _KEPT) if number else unit
        beyond = _BEYOND * radius * average.norm(dim=1, keepdim=True) - at.margins[:, None] / size
        heights = (average * at.points).sum(1) + beyond.squeeze(1)
        moved = nearest_in_box(norm, at.points, at.inputs, average, heights, radius=radius, bounds=bounds)
        return moved, average, scale

    width = torch.full_like(points[:, :1], bounds[1] - bounds[0])
    offsets = points - inputs
    largest, mean_square = offsets.abs().amax(1, keepdim=True), offsets.square().mean(1, keepdim=True)
    scale = {"linf": largest, "l2": mean_square.sqrt(), "l1": width}[norm]
    return (points, torch.zeros_like(points), scale), step


# Steps in a box reach the nearest point on the boundary's inner side, to the digits that the last box allows. That
# often lies where regions meet, each with its own gradient, so steps follow an average of the gradients so far.
trust_region_steps = Steps(_trust_region, classify_last=True)


def then_trust_region(
    oracle: BoundaryOracle,
    points: Tensor,
    sample_index: Tensor,
    *,
    steps: int,
    first: Steps,
    last: int,
    norm: str | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    """Take all but the ``last`` steps by ``first``, and these in the trust region from the nearest point of the others.

    The ``first`` steps use ``norm``, if given, also for what is nearest. The rest is that of :class:`Steps`.
    """
    begun = oracle if norm is None else oracle.in_norm(norm)
    reached, _ = first(begun, points, sample_index, steps=steps - last, **given)
    return trust_region_steps(oracle, reached, sample_index, steps=last, **given)


def project_beyond_plane(
    norm: str,
    inputs: Tensor,
    normals: Tensor,
    heights: Tensor,
    *,
    bounds: tuple[float, float] | tuple[Tensor, Tensor],
) -> Tensor:
    """Minimise ``||z - inputs||`` over ``z`` in the bounds with ``normals . z >= heights``.

    Inputs, in bounds, and normals are ``(B, D)``, heights ``(B,)``, bounds numbers or ``(B, D)``. The solution is in
    closed form, up to a sort. Where no point of the box lies beyond the plane, the one that comes closest to it is
    returned.
    """
    size = normals.abs()
    room = torch.where(size > 0, room_towards(normals, inputs, bounds), 0)
    need = (heights - (normals * inputs).sum(1)).clamp_min_(0).unsqueeze(1)
    tiny = torch.finfo(size.dtype).tiny
    if norm == "l1":
        size_sorted, order = size.sort(1, descending=True)
        room_sorted = room.gather(1, order)
        gain = size_sorted * room_sorted
        missing = (need - (gain.cumsum(1) - gain)).clamp_min_(0)
        taken = torch.minimum(room_sorted, missing / size_sorted.clamp_min(tiny))
        moved = torch.zeros_like(taken).scatter_(1, order, taken)
    else:
        # Each value moves by min(t * pace, room), and the gains at t add up to the need: between the sorted times at
        # which values stop, the gain is linear in t.
        pace = size if norm == "l2" else (size > 0).to(size)
        stops = torch.where(size > 0, room / pace.clamp_min(tiny), torch.inf)
        ends, order = stops.sort(1)
        gain, slope = (size * room).gather(1, order), (size * pace).gather(1, order)
        stopped = gain.cumsum(1) - gain
        moving = slope.flip(1).cumsum(1).flip(1)
        # The gain at the end of each piece; the first piece that reaches the need holds t.
        reached = stopped + moving * torch.where(ends.isinf(), 0, ends) >= need
        exists = reached.any(1, keepdim=True)
        piece = reached.byte().argmax(1, keepdim=True)
        time = (need - stopped.gather(1, piece)) / moving.gather(1, piece).clamp_min(tiny)
        moved = torch.where(exists, torch.minimum(time.clamp_min(0) * pace, room), room)
    return (inputs + moved * normals.sign()).clamp_(*bounds)


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
