"""The nearest point of a box beyond a plane, in closed form up to a sort, for linf, l2 and l1.

Source: Croce and Hein, "Minimally distorted adversarial examples with a fast adaptive boundary attack" (2020), section
2.2; this is the problem of a region with its decision row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def nearest_beyond(
    norm: str, inputs: Tensor, normals: Tensor, heights: Tensor, *, bounds: tuple[float, float]
) -> Tensor:
    """Minimise ``||z - inputs||`` over ``z`` in the bounds with ``normals . z >= heights``.

    Where no point of the box lies beyond the plane, the one that comes closest to it is returned.

    Args:
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        inputs: ``(B, D)``, in the bounds.
        normals: ``(B, D)``.
        heights: ``(B,)``.
        bounds: Lowest and highest value.

    Returns:
        ``(B, D)``.
    """
    size = normals.abs()
    room = torch.where(normals > 0, bounds[1] - inputs, inputs - bounds[0]).clamp_min_(0)
    room = torch.where(size > 0, room, 0)
    need = (heights - (normals * inputs).sum(1)).clamp_min_(0).unsqueeze(1)
    if norm == "l1":
        size_sorted, order = size.sort(1, descending=True)
        room_sorted = room.gather(1, order)
        gain = size_sorted * room_sorted
        missing = (need - (gain.cumsum(1) - gain)).clamp_min_(0)
        taken = torch.minimum(room_sorted, missing / size_sorted.clamp_min(torch.finfo(size.dtype).tiny))
        moved = torch.zeros_like(taken).scatter_(1, order, taken)
    else:
        # Each value moves by min(t * pace, room), and t is where the gains add up to what is needed: sorted by the t
        # at which they stop, the gain is linear in between.
        pace = size if norm == "l2" else (size > 0).to(size)
        stops = torch.where(size > 0, room / pace.clamp_min(torch.finfo(size.dtype).tiny), torch.inf)
        ends, order = stops.sort(1)
        gain, slope = (size * room).gather(1, order), (size * pace).gather(1, order)
        stopped = gain.cumsum(1) - gain
        moving = slope.flip(1).cumsum(1).flip(1)
        # The gain at the end of each piece; the first piece that reaches the need holds t.
        reached = stopped + moving * torch.where(ends.isinf(), 0, ends) >= need
        exists = reached.any(1, keepdim=True)
        piece = reached.byte().argmax(1, keepdim=True)
        time = (need - stopped.gather(1, piece)) / moving.gather(1, piece).clamp_min(torch.finfo(size.dtype).tiny)
        moved = torch.where(exists, torch.minimum(time.clamp_min(0) * pace, room), room)
    return (inputs + moved * normals.sign()).clamp_(*bounds)
