"""The problems of the solver: their constraints, the scaling of the rows, and what follows from the norm and the box.

Source of the scaling: Croce, Rauber and Hein, "Scaling up the randomized gradient-free adversarial attack reveals
overestimation of robustness using established attacks" (2019), section 4.2. They measure the norms of ten rows of a
layer and use their mean for all of it; here each row has its own estimate, as ``E (c . g)^2 = ||c||^2`` for a standard
normal ``g``.

The proximal step and the dual bound are those of ``||z - x0||`` plus the constraint that ``z`` lies in the box, written
in ``u = z - x0``. A coordinate that moves towards the sign of its force can go as far as its ``room``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import Selectable, room_towards
from robust_ext.attacks.linear_region.network.regions import Regions
from robust_ext.core.target import PassCounter


def shrink(norm: str, offsets: Tensor, inputs: Tensor, amount: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Return the proximal step, ``argmin_u .5 ||u - offsets||^2 + amount ||u||`` with ``inputs + u`` in bounds.

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
    """Return a lower bound on the distance of every feasible point, from multipliers ``y >= 0`` by weak duality.

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
    """Return whether multipliers prove that no point of the box is feasible (Farkas), bool ``(B,)``.

    No ``u`` in the box has ``force . u >= reward``, see :func:`lower_bound`. The proof must hold by ``margin`` of the
    numbers it compares.
    """
    most = force.abs().mul_(room_towards(force, inputs, bounds)).sum(1)
    return (reward > 0) & (reward - most > margin * (reward + most))


class RegionConstraints:
    """The constraints of problems 10 and 11 of Croce, Rauber and Hein (2019), which count passes.

    The first rows keep each of ``B`` points in its region; the others are ``differences @ logits``, the combinations of
    the ``K`` logits ``(B, R, K)`` that must be at least 0.
    """

    def __init__(self, regions: Regions, differences: Tensor, counter: PassCounter) -> None:
        self.regions, self._differences, self._counter = regions, differences, counter

    @cached_property
    def decision(self) -> Tensor:
        """The last ``R`` rows, bool ``(M + R,)``."""
        rows = self._differences.shape[1]
        places = torch.arange(self.regions.constraints + rows, device=self._differences.device)
        return places >= self.regions.constraints

    def forward(self, points: Tensor) -> Tensor:
        """Return the values at points ``(B, D)``, ``(B, M + R)``, with one forward pass."""
        self._counter.count_forward(len(points))
        values, logits = self.regions.forward(points.view(-1, *self.regions.shape), spare=self._differences.shape[1])
        values[:, self.regions.constraints :] = (self._differences * logits.unsqueeze(1)).sum(2)
        return values

    def adjoint(self, multipliers: Tensor) -> Tensor:
        """Return the transposed product of multipliers ``(B, M + R)``, ``(B, D)``, with one backward pass."""
        self._counter.count_backward(len(multipliers))
        kept = self.regions.constraints
        logits = (multipliers[:, kept:].unsqueeze(2) * self._differences).sum(1)
        return self.regions.adjoint(multipliers[:, :kept], logits).flatten(1)

    def select(self, rows: Tensor) -> RegionConstraints:
        """Return the problems with these indices, int64 ``(R,)``."""
        return RegionConstraints(self.regions.select(rows), self._differences[rows], self._counter)


@dataclass
class ScaledProblem(Selectable):
    """The rows times positive factors ``(B, M)``, with the box and the inputs ``x0`` ``(B, D)``.

    ``size`` is the spectral norm of each matrix times its factors, ``(B,)``, and may be rough; ``values`` are the
    scaled ones at the inputs, ``(B, M)``. A proof of infeasibility must have the relative ``margin``.
    """

    constraints: RegionConstraints
    factors: Tensor
    size: Tensor
    inputs: Tensor
    values: Tensor
    bounds: tuple[float, float]
    norm: str
    margin: float

    def forward(self, points: Tensor) -> Tensor:
        """Return scaled values of the rows, ``(B, M)``."""
        return self.constraints.forward(points).mul_(self.factors)

    def adjoint(self, multipliers: Tensor) -> Tensor:
        """Return the force that multipliers of the scaled rows ``(B, M)`` put on the points, ``(B, D)``."""
        return self.constraints.adjoint(multipliers * self.factors)

    def reward(self, multipliers: Tensor) -> Tensor:
        """Return ``-y . (C x0 + d)``, ``(B,)``."""
        return -dot(multipliers, self.values).squeeze(1)

    def proofs(self, force: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        """Return lower bounds on the distances, and whether infeasibility is proven, both ``(B,)``."""
        bound = lower_bound(self.norm, force, reward, self.inputs, self.bounds)
        return bound, is_contradiction(force, reward, self.inputs, self.bounds, self.margin)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return inner products of rows, ``(B, 1)``."""
    return (a * b).sum(1, keepdim=True)


def square(a: Tensor) -> Tensor:
    """Return squared lengths of rows, ``(B, 1)``; on CPUs several times faster than :func:`dot`."""
    lengths: Tensor = torch.linalg.vector_norm(a, dim=1, keepdim=True)
    return lengths.square_()


@torch.no_grad()
def estimate_scaling(
    constraints: RegionConstraints,
    inputs: Tensor,
    *,
    generator: torch.Generator,
    probes: int = 16,
    power_iterations: int = 8,
    decision_weight: float = 5.0,
) -> tuple[Tensor, Tensor]:
    """Return factors that bring rows to about norm 1, and decision rows to ``decision_weight``, and the matrix's norm.

    Any factors lead to the right solution, so those of a region serve its neighbours too.

    Takes ``probes + power_iterations + 1`` products with the matrix and ``power_iterations`` with its transpose, for
    the norms of the rows and for that of the matrix, which is on average a little too low. The inputs are any points
    near the solutions; all problems share the random vectors. The weight is lowered to half the norm of the whole
    matrix where that is smaller, since beyond it the decision rows alone would dictate a shorter step.
    """
    base = constraints.forward(inputs)

    def draw() -> Tensor:
        return torch.randn(inputs.shape[1], generator=generator, dtype=torch.float64).to(inputs).expand_as(inputs)

    squares = torch.zeros_like(base)
    for _ in range(probes):
        squares += (constraints.forward(inputs + draw()) - base).square_()
    sizes = (squares / probes).sqrt_()
    if sizes.numel() == 0:
        return torch.ones_like(sizes), sizes.new_zeros(len(sizes))
    # Differences this small are rounding: such a row is constant, and must not be blown up.
    least = sizes.amax(1, keepdim=True) * (16 * torch.finfo(sizes.dtype).eps)
    rows = torch.where(least > 0, sizes.maximum(least), 1).reciprocal_()
    vector, norm = draw(), sizes.new_zeros(len(sizes))
    for number in range(power_iterations):
        if 2 * number >= power_iterations:
            weight = (norm / 2).clamp(1, decision_weight).unsqueeze(1)
            weighted = torch.where(constraints.decision, rows * weight, rows)
        else:
            weighted = rows
        vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(torch.finfo(vector.dtype).tiny)
        image = (constraints.forward(inputs + vector) - base) * weighted
        norm = image.norm(dim=1)
        vector = constraints.adjoint(image * weighted)
    return weighted, norm
