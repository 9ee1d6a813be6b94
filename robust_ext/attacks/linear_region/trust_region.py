"""Steps in l1 that each solve the problem of the linearised boundary, in a small box around the point.

The projections of :mod:`robust_ext.attacks.linear_region.fab` change few values by much, beyond where the linearisation
holds. In a box, the nearest point on the boundary's inner side is reached step by step, to the digits that the last
box allows.

Source: Brendel et al., "Accurate, reliable and fast robustness evaluation" (2019), section 2, for steps that minimise
the distance on the linearised boundary within a trust region. Different from it: the region is a box, in which the
problem has a closed form, and its size falls geometrically.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.fab import project_beyond_plane
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.stepping import Going, Nearest

# Half the width of the first and the last box, as shares of the range of the bounds.
_FIRST, _LAST = 0.05, 0.001
# How far beyond the plane is aimed, as a share of what the value with the largest gradient can gain in the box.
_BEYOND = 2e-3


def trust_region_steps(
    oracle: BoundaryOracle,
    points: Tensor,
    sample_index: Tensor,
    *,
    steps: int,
    going: Going,
    aims: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step from points ``(B, ...)``, and return the nearest adversarial ones that were met, with their distances.

    The arguments and what is returned are those of :func:`~robust_ext.attacks.linear_region.fab.fab_steps`.
    """
    low, high = oracle.threat_model.bounds
    met = Nearest(points)
    rows, here = torch.arange(len(points), device=points.device), points
    for number in range(steps):
        open_rows = going(sample_index[rows])
        if not bool(open_rows.all()):
            rows, here = rows[open_rows], here[open_rows]
        if len(rows) == 0:
            return met.points, met.distances
        samples = sample_index[rows]
        margin, gradient, good = oracle.linearised(here, samples, None if aims is None else aims[rows])
        met.offer(rows, here, oracle.distances(here, samples), good)
        radius = (high - low) * _FIRST * (_LAST / _FIRST) ** (number / max(1, steps - 1))
        flat, inputs, gradient = here.flatten(1), oracle.inputs[samples].flatten(1), gradient.nan_to_num(0, 0, 0)
        heights = (gradient * flat).sum(1) - margin.nan_to_num(0, 0, 0)
        heights += _BEYOND * radius * gradient.abs().amax(1)
        here = nearest_in_box(flat, inputs, gradient, heights, radius=radius, bounds=(low, high)).view_as(here)
    met.offer(rows, here, oracle.distances(here, sample_index[rows]), oracle.adversarial(here, sample_index[rows]))
    return met.points, met.distances


def nearest_in_box(
    points: Tensor, inputs: Tensor, normals: Tensor, heights: Tensor, *, radius: float, bounds: tuple[float, float]
) -> Tensor:
    """Minimise ``||z - inputs||_1`` with ``normals . z >= heights``, ``|z - points| <= radius`` and z in the bounds.

    Points and inputs, in bounds, and normals are ``(B, D)``, heights ``(B,)``. Where no such point lies beyond the
    plane, the one that comes closest to it is returned.
    """
    # The point of the box that is nearest to the input: from there on, each value costs what it moves.
    offsets = points - inputs
    nearest = inputs + offsets.sign() * (offsets.abs() - radius).clamp_min_(0)
    box = ((points - radius).clamp_min_(bounds[0]), (points + radius).clamp_max_(bounds[1]))
    return project_beyond_plane("l1", nearest.clamp_(*box), normals, heights, bounds=box)
