"""The loop of all steps towards nearer points: it keeps the nearest on the way, and decides whether a start moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.state import SearchState

# Whether there may be steps from points, bool (B,), by the inputs they belong to, int64 (B,).
Going = Callable[[Tensor], Tensor]
# The share of the perturbation that is kept in the bisection to the input after steps, and how much farther than before
# they may have ended for that to be tried.
_LEAST, _WORTH = 0.9, 1.01


class Nearest:
    """The nearest adversarial points that steps from points ``(B, ...)`` have met, and their distances ``(B,)``."""

    def __init__(self, points: Tensor) -> None:
        self.points = points.clone()
        self.distances = torch.full((len(points),), torch.inf, dtype=torch.float64, device=points.device)

    def offer(self, rows: Tensor, points: Tensor, distances: Tensor, adversarial: Tensor) -> None:
        """Keep the nearer points for these indices, int64."""
        better = adversarial & (distances < self.distances[rows])
        self.points[rows[better]], self.distances[rows[better]] = points[better], distances[better]


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

    @property
    def heights(self) -> Tensor:
        """The boundary's height along the gradients, ``(B,)``: it is where ``gradients . z`` is that."""
        return (self.gradients * self.points).sum(1) - self.margins


# From the step's number, the boundary and the state (see :func:`followed`) to the next state.
Step = Callable[..., tuple[Tensor, ...]]


def followed(
    oracle: BoundaryOracle,
    state: tuple[Tensor, ...],
    sample_index: Tensor,
    step: Step,
    *,
    steps: int,
    going: Going,
    aims: Tensor | None = None,
    classify_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Take steps, and return the nearest adversarial points on the way, with their distances.

    Args:
        oracle: The network.
        state: The points ``(B, D)`` to begin with, adversarial or not, and what else a step passes on to the next, a
            row for each point.
        sample_index: The inputs that they belong to, int64 ``(B,)``.
        step: Called with the step's number, the boundary at the points, and the rest of the state: the next state.
        steps: How many.
        going: Before each step, points for which it is False are left as they are.
        aims: Where these, int64 ``(B,)``, are at least 0, the boundary is the one between the label and this class.
        classify_last: Whether one more forward pass classifies the last points.

    Returns:
        Points ``(B, ...)``, and distances, float64 ``(B,)``, infinite where none was adversarial.
    """
    shape = oracle.inputs.shape[1:]
    met, rows = Nearest(state[0].view(-1, *shape)), torch.arange(len(sample_index), device=sample_index.device)
    for number in range(steps):
        open_rows = going(sample_index[rows])
        if not bool(open_rows.all()):
            rows, state = rows[open_rows], tuple(part[open_rows] for part in state)
        if len(rows) == 0:
            return met.points, met.distances
        here, samples = state[0].view(-1, *shape), sample_index[rows]
        margins, gradients, adversarial = oracle.linearised(here, samples, None if aims is None else aims[rows])
        distances = oracle.distances(here, samples)
        met.offer(rows, here, distances, adversarial)
        boundary = Linearised(
            points=state[0],
            inputs=oracle.inputs[samples].flatten(1),
            margins=margins.nan_to_num(0, 0, 0),
            gradients=gradients.nan_to_num(0, 0, 0),
            adversarial=adversarial,
            distances=distances,
            nearest=met.distances[rows],
        )
        state = step(number, boundary, *state[1:])
    if classify_last:
        here, samples = state[0].view(-1, *shape), sample_index[rows]
        met.offer(rows, here, oracle.distances(here, samples), oracle.adversarial(here, samples))
    return met.points, met.distances


# Several steps from points, as :func:`followed` takes them: `fab_steps`, `descent_steps` and their kin.
Steps = Callable[..., tuple[Tensor, Tensor]]


def stepped(
    oracle: BoundaryOracle,
    state: SearchState,
    away: Tensor,
    take: Steps,
    *,
    steps: int,
    going: Going,
    batch: int,
    **more: Tensor | None,
) -> SearchState:
    """Return the starts after steps from ``away (B, ...)``, ``batch`` at once; starts move only if they get nearer.

    ``more`` are further arguments of the steps, ``(B,)`` each.
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
