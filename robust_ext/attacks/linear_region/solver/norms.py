"""What the solver needs of the linf and l1 norms over a box: the proximal step, and the dual bound in closed form.

Both are those of ``||z - x0||`` plus the constraint that ``z`` lies in the box, written in ``u = z - x0``. A coordinate
that moves towards the sign of its force can go as far as its ``room``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def room_towards(force: Tensor, inputs: Tensor, bounds: tuple[float, float]) -> Tensor:
    """How far each coordinate of ``inputs`` ``(B, D)`` can go in the direction of ``force`` before it meets a bound."""
    return torch.where(force > 0, bounds[1] - inputs, inputs - bounds[0]).clamp_min_(0)


def shrink(norm: str, offsets: Tensor, inputs: Tensor, amount: Tensor, bounds: tuple[float, float]) -> Tensor:
    """The proximal step of linf or l1: ``argmin_u .5 ||u - offsets||^2 + amount ||u||`` with ``inputs + u`` in bounds.

    Offsets and inputs are ``(B, D)``, amounts ``(B, 1)`` and above 0.
    """
    room, size = room_towards(offsets, inputs, bounds), offsets.abs()
    if norm == "l1":
        return torch.minimum((size - amount).clamp_min_(0), room) * offsets.sign()
    reach = torch.minimum(size, room)
    # For a radius r the coordinates whose reach is larger stop at r, and pull at it with size - r each. The pull falls
    # as r grows, with a jump where a coordinate meets its bound, and the radius is where it passes the amount.
    ends, order = reach.sort(dim=1, descending=True)
    total = size.gather(1, order).cumsum_(1)
    count = torch.arange(1, ends.shape[1] + 1, dtype=ends.dtype, device=ends.device)
    enough = total - count * ends >= amount
    first = torch.where(enough.any(1, keepdim=True), enough.byte().argmax(1, keepdim=True), ends.shape[1])
    last = (first - 1).clamp_min_(0)
    radius = (total.gather(1, last) - amount) / (last + 1)
    lower = torch.cat([ends, torch.zeros_like(ends[:, :1])], 1).gather(1, first)
    radius = torch.minimum(torch.maximum(radius, lower), ends.gather(1, last))
    return torch.minimum(reach, radius) * offsets.sign()


def lower_bound(norm: str, force: Tensor, reward: Tensor, inputs: Tensor, bounds: tuple[float, float]) -> Tensor:
    """A lower bound on the distance of every feasible point, from multipliers ``y >= 0`` by weak duality.

    For feasible ``z = x0 + u`` in the box, ``y . (C z + d) >= 0`` means ``force . u >= reward``. So the distance is at
    least ``reward + min_u ||u|| - force . u`` over the box, and at least ``reward / ||force||*`` (Hölder), which is the
    same for the best multiple of ``y`` if the box is wide. The larger of the two is returned (l2: Hölder's alone),
    ``(B,)`` and at least 0, for the force ``C^T y (B, D)`` and the reward ``-y . (C x0 + d)``, ``(B,)``.
    """
    size = force.abs()
    order = {"linf": 1.0, "l2": 2.0, "l1": torch.inf}[norm]
    dual_norm = torch.linalg.vector_norm(size, ord=order, dim=1).clamp_min_(torch.finfo(size.dtype).tiny)
    bound: Tensor = reward / dual_norm
    if norm == "l1":
        gain = (size - 1).clamp_min_(0).mul_(room_towards(force, inputs, bounds)).sum(1)
        bound = torch.maximum(bound, reward - gain)
    elif norm == "linf":
        ends, places = room_towards(force, inputs, bounds).sort(dim=1, descending=True)
        size = size.gather(1, places)
        weight, inner = size.cumsum(1), size.mul_(ends)
        # r - sum_i size_i min(r, room_i) is convex and piecewise linear in r, so it is least at a room or at 0.
        values = ends - weight * ends - (inner.sum(1, keepdim=True) - inner.cumsum(1))
        bound = torch.maximum(bound, reward + values.amin(1).clamp_max_(0))
    return bound.clamp_min_(0)


def is_contradiction(
    force: Tensor, reward: Tensor, inputs: Tensor, bounds: tuple[float, float], margin: float
) -> Tensor:
    """Whether multipliers prove that no point of the box is feasible (Farkas), bool ``(B,)``.

    No ``u`` in the box has ``force . u >= reward``, see :func:`lower_bound`. The proof must hold by ``margin`` of the
    numbers it compares.
    """
    most = force.abs().mul_(room_towards(force, inputs, bounds)).sum(1)
    return (reward > 0) & (reward - most > margin * (reward + most))
