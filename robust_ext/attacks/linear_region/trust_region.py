"""Steps in l1 that each solve the problem of the linearised boundary, in a small box around the point.

The projections of :mod:`robust_ext.attacks.linear_region.fab` change few values by much, beyond where the linearisation
holds. In a box, the nearest point on the boundary's inner side is reached step by step, to the digits that the last
box allows.

Source: Brendel et al., "Accurate, reliable and fast robustness evaluation" (2019), section 2, for steps that minimise
the distance on the linearised boundary within a trust region. Different from it: the region is a box, in which the
problem has a closed form, and its size falls geometrically.
"""

from __future__ import annotations

from torch import Tensor

from robust_ext.attacks.linear_region.fab import project_beyond_plane
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.stepping import Going, Linearised, followed

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
    bounds = oracle.threat_model.bounds

    def step(number: int, at: Linearised) -> tuple[Tensor]:
        radius = (bounds[1] - bounds[0]) * _FIRST * (_LAST / _FIRST) ** (number / max(1, steps - 1))
        heights = at.heights + _BEYOND * radius * at.gradients.abs().amax(1)
        return (nearest_in_box(at.points, at.inputs, at.gradients, heights, radius=radius, bounds=bounds),)

    start = (points.flatten(1),)
    return followed(oracle, start, sample_index, step, steps=steps, going=going, aims=aims, classify_last=True)


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
