"""Steps from points towards the nearest adversarial points: their loop, descents and proximal steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import room_towards
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.state import SearchState

# Whether there may be steps from points, bool (B,), by the inputs they belong to, int64 (B,).
Going = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Linearised:
    """The boundary at points ``(B, D)``, from which the next ones are computed: numbers and gradients are finite.

    Inputs and gradients are ``(B, D)``, margins ``(B,)``. Which points are adversarial is bool, their distances and the
    nearest that were met from the same starts are float64, ``(B,)`` each.
    """

    points: Tensor
    inputs: Tensor
    margins: Tensor
    gradients: Tensor
    adversarial: Tensor
    distances: Tensor
    nearest: Tensor


# The points (B, D), and what else a step passes on to the next, a row for each point.
State = tuple[Tensor, ...]
# From the step's number, the boundary and the rest of the state to the next state.
Step = Callable[..., State]


@dataclass(frozen=True)
class Steps:
    """Several steps of one kind; ``classify_last`` sends the last points forward once more.

    ``begin`` returns the first state and the step, from the oracle, points and inputs ``(B, D)``, the number of steps,
    and further arguments of the kind.
    """

    begin: Callable[..., tuple[State, Step]]
    classify_last: bool = False

    def __call__(
        self,
        oracle: BoundaryOracle,
        points: Tensor,
        sample_index: Tensor,
        *,
        steps: int,
        going: Going,
        aims: Tensor | None = None,
        **given: Tensor | float,
    ) -> tuple[Tensor, Tensor]:
        """Take steps, and return the nearest adversarial points on the way, with their distances.

        Args:
            oracle: The network.
            points: Where to begin, ``(B, ...)``, adversarial or not.
            sample_index: The inputs that they belong to, int64 ``(B,)``.
            steps: How many.
            going: Before each step, points for which it is False are left as they are.
            aims: Where these, int64 ``(B,)``, are at least 0, the boundary is the one between label and this class.
            **given: Further arguments of the kind.

        Returns:
            Points ``(B, ...)``, and distances, float64 ``(B,)``, infinite where none was adversarial.
        """
        met, lengths = points.clone(), points.new_full((len(points),), torch.inf, dtype=torch.float64)
        rows = torch.arange(len(points), device=points.device)

        def offer(here: Tensor, distances: Tensor, adversarial: Tensor) -> None:
            better = adversarial & (distances < lengths[rows])
            met[rows[better]], lengths[rows[better]] = here[better], distances[better]

        inputs = oracle.inputs[sample_index].flatten(1)
        state, step = self.begin(oracle, points.flatten(1), inputs, steps=steps, **given)
        for number in range(steps):
            open_rows = going(sample_index[rows])
            if not bool(open_rows.all()):
                rows, state = rows[open_rows], tuple(part[open_rows] for part in state)
            if len(rows) == 0:
                return met, lengths
            here, samples = state[0].view(-1, *points.shape[1:]), sample_index[rows]
            margins, gradients, adversarial = oracle.linearised(here, samples, None if aims is None else aims[rows])
            distances = oracle.distances(here, samples)
            offer(here, distances, adversarial)
            margins, gradients = margins.nan_to_num(0, 0, 0), gradients.nan_to_num(0, 0, 0)
            nearest = lengths[rows]
            boundary = Linearised(state[0], inputs[rows], margins, gradients, adversarial, distances, nearest)
            state = step(number, boundary, *state[1:])
        if self.classify_last:
            here, samples = state[0].view(-1, *points.shape[1:]), sample_index[rows]
            offer(here, oracle.distances(here, samples), oracle.adversarial(here, samples))
        return met, lengths


# The share of the perturbation that is kept in the bisection to the input after steps, and how much farther than before
# they may have ended for that to be tried.
_LEAST, _WORTH = 0.9, 1.01


def stepped(
    oracle: BoundaryOracle,
    state: SearchState,
    away: Tensor,
    take: Callable[..., tuple[Tensor, Tensor]],
    *,
    steps: int,
    going: Going,
    batch: int,
    **more: Tensor | None,
) -> SearchState:
    """Return the starts after steps from ``away (B, ...)``, ``batch`` at once; starts move only if they get nearer.

    ``take`` is a :class:`Steps` or called like it, ``more`` are further arguments of it, ``(B,)`` each.
    """
    points, distances, samples = state.points.clone(), state.distances.clone(), state.sample_index
    for rows in torch.split(torch.arange(len(samples), device=samples.device), batch):
        chosen = {name: value[rows] for name, value in more.items() if value is not None}
        reached, lengths = take(oracle, away[rows], samples[rows], steps=steps, going=going, **chosen)
        good = torch.isfinite(lengths) & (lengths < distances[rows] * _WORTH)
        rows = rows[good]
        moved = oracle.bisect_to_input(reached[good], samples[rows], least=_LEAST)
        lengths = oracle.distances(moved, samples[rows])
        nearer = lengths < distances[rows]
        points[rows[nearer]], distances[rows[nearer]] = moved[nearer], lengths[nearer]
    return replace(state, points=points, distances=distances)


# First and last share by which the ball changes from step to step.
_CHANGE = {"linf": (0.1, 0.001), "l2": (0.3, 0.001)}
# Lengths of the first and the last step, as multiples of the radius. In l2 the first ones turn the perturbation nearly
# into the gradient, which leads to nearer points than shorter ones do.
_LENGTH = {"linf": (1.0, 0.01), "l2": (5.0, 0.01)}
# The same near a known point.
_STEADY, _SHORT = (0.01, 0.01), (0.25, 0.01)


def _descent(
    oracle: BoundaryOracle, points: Tensor, inputs: Tensor, *, steps: int, limits: Tensor | None = None
) -> tuple[State, Step]:
    norm, bounds = oracle.threat_model.norm, oracle.threat_model.bounds
    offsets, radius = points - inputs, torch.zeros_like(inputs[:, :1])
    lengths, changes = (_LENGTH[norm], _CHANGE[norm]) if limits is None else (_SHORT, _STEADY)
    if limits is not None:
        radius = limits.to(inputs)[:, None] * (1 - changes[0])
        offsets = _inside(norm, offsets, inputs, radius, bounds)

    def step(number: int, at: Linearised, offsets: Tensor, radius: Tensor) -> State:
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

    return (inputs + offsets, offsets, radius), step


# Steepest descents in a ball that shrinks and grows. With ``limits``, float64 (B,), steps are short, in balls that
# begin just below these distances.
descent_steps = Steps(_descent)


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
    room, size = room_towards(offsets, inputs, bounds), offsets.abs()
    if norm == "linf":
        size = torch.minimum(size, radius)
    else:
        length = size.norm(dim=1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
        size = size * (radius / length).clamp_max(1)
    return torch.minimum(size, room) * offsets.sign()


# The last length of a step, as a share of the first.
_LAST = 0.01
# Averages of Adam.
_MEAN, _SQUARE = 0.9, 0.999
# First logarithm of the weight of the margin, relative to that of the distance, its largest size, first and last change
# in a step, and the share of the weights that is kept from step to step.
_WEIGHT, _LARGEST, _PROXIMAL_CHANGE, _KEPT = math.log(100), math.log(1e6), (0.1, 0.01), 0.9
# How many times that of the largest gradient the threshold of a value is at most.
_THRESHOLD = 5.0


def _proximal(
    oracle: BoundaryOracle, points: Tensor, inputs: Tensor, *, steps: int, length: float = 0.3
) -> tuple[State, Step]:
    low, high = oracle.threat_model.bounds
    offsets = points - inputs
    weight = torch.full_like(offsets[:, :1], _WEIGHT)

    def step(
        number: int, at: Linearised, offsets: Tensor, mean: Tensor, square: Tensor, weight: Tensor, kept: Tensor
    ) -> State:
        gradient = at.gradients * (-at.margins[:, None]).sigmoid()
        mean = torch.lerp(gradient, mean, _MEAN)
        square = torch.lerp(gradient.square(), square, _SQUARE)
        scale = (square / (1 - _SQUARE ** (number + 1))).sqrt().clamp_min(1e-12)
        shorter = length * _LAST ** (number / steps)
        moved = shorter * (high - low) / (1 - _MEAN ** (number + 1)) * mean / scale
        offsets = (at.inputs + offsets + moved).clamp_(low, high) - at.inputs
        threshold = torch.minimum(1 / scale, _THRESHOLD / scale.amax(1, keepdim=True)) * shorter * (1 - kept) / kept
        offsets = offsets.sign() * (offsets.abs() - threshold).clamp_min_(0)
        change = _PROXIMAL_CHANGE[1] + (_PROXIMAL_CHANGE[0] - _PROXIMAL_CHANGE[1]) * (1 - number / steps)
        weight = (weight - torch.where(at.adversarial[:, None], change, -change)).clamp_(-_LARGEST, _LARGEST)
        kept = torch.lerp(weight.sigmoid(), kept, _KEPT)
        return at.inputs + offsets, offsets, mean, square, weight, kept

    blank = torch.zeros_like(offsets)
    return (inputs + offsets, offsets, blank, blank, weight, weight.sigmoid()), step


# Adam's steps and soft thresholds that make perturbations sparse. The first step changes each value by the share
# ``length`` of the range of the bounds.
proximal_steps = Steps(_proximal)
