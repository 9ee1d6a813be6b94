"""Steps along the decision boundary towards the input, which use the decision row of a region only.

They are cheap, one pass forward and one back each, and bring far starts near before regions are solved; a basin hop
is a random jump and a few of these steps back.

Source: Croce and Hein, "Minimally distorted adversarial examples with a fast adaptive boundary attack" (2020), section
3, without its backward step; the weight of the input falls from step to step. The projections are those of its section
2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.stepping import Going, Linearised, followed

# Weights of the input's own projection in the first and the last step.
_FIRST, _LAST = 0.5, 0.05
# How far beyond the plane is aimed, as a share of the distance.
_BEYOND = 2e-3


def fab_steps(
    oracle: BoundaryOracle,
    points: Tensor,
    sample_index: Tensor,
    *,
    steps: int,
    going: Going,
    aims: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step from points ``(B, ...)``, adversarial or not, and return the nearest adversarial points on the way.

    One more forward pass classifies the last points. For the other arguments and the result, see
    :func:`~robust_ext.attacks.linear_region.stepping.followed`.
    """
    norm, bounds = oracle.threat_model.norm, oracle.threat_model.bounds

    def step(number: int, at: Linearised) -> tuple[Tensor]:
        weight = float(_FIRST * (_LAST / _FIRST) ** (number / max(1, steps - 1)))
        reach = torch.linalg.vector_norm(at.gradients, dim=1) * (at.points - at.inputs).norm(dim=1)
        heights = at.heights + _BEYOND * reach
        near = project_beyond_plane(norm, at.points, at.gradients, heights, bounds=bounds)
        aim = project_beyond_plane(norm, at.inputs, at.gradients, heights, bounds=bounds)
        return (torch.lerp(near, aim, weight),)

    start = (points.flatten(1),)
    return followed(oracle, start, sample_index, step, steps=steps, going=going, aims=aims, classify_last=True)


def random_jump(
    points: Tensor, inputs: Tensor, streams: Sequence[torch.Generator], *, length: float, bounds: tuple[float, float]
) -> Tensor:
    """Move each point ``(B, ...)`` in a random direction by ``length`` times its perturbation's l2 norm, clipped."""
    offsets = (points - inputs).flatten(1)
    drawn = torch.stack([torch.randn(offsets.shape[1], generator=one) for one in streams]).to(offsets)
    drawn *= length * offsets.norm(dim=1, keepdim=True) / drawn.norm(dim=1, keepdim=True).clamp_min_(1e-12)
    return (points.flatten(1) + drawn).clamp_(*bounds).view_as(points)


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
    room = torch.where(normals > 0, bounds[1] - inputs, inputs - bounds[0]).clamp_min_(0)
    room = torch.where(size > 0, room, 0)
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
