"""Basin hops: a random jump from each start, and steps back, of several kinds that share the passes of each input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.plane_steps import fab_steps, then_trust_region, trust_region_steps
from robust_ext.attacks.linear_region.state import SearchState
from robust_ext.attacks.linear_region.stepping import Going, descent_steps, proximal_steps, stepped

# The least share of each kind of hop, and the factor by which its gain fades with each hop.
_LEAST, _FADING = 0.1, 0.5


@dataclass(frozen=True)
class Hop:
    """A jump's length, as a multiple of the perturbation's l2 norm, and the steps back.

    ``limited`` steps stay nearer than the nearest known point. Costly hops are made from the ``most`` promising starts
    of each input alone.
    """

    take: Callable[..., tuple[Tensor, Tensor]]
    length: float
    steps: int
    limited: bool = False
    most: int | None = None


HOPS = {
    "linf": (Hop(descent_steps, 0.5, 24, limited=True), Hop(fab_steps, 0.1, 30)),
    "l2": (Hop(fab_steps, 1.5, 12), Hop(descent_steps, 2.0, 60, most=2)),
    # Steps in l2 end at other points than steps in l1 do, of which some are nearer once they were made sparse.
    "l1": (
        Hop(partial(then_trust_region, first=fab_steps, last=20), 1.5, 32, most=2),
        Hop(partial(then_trust_region, first=descent_steps, last=40, norm="l2"), 2.0, 100, most=2),
        Hop(proximal_steps, 4.0, 240, most=2),
        Hop(partial(proximal_steps, length=0.1), 4.0, 240, most=2),
    ),
}
# Steps after all hops, without a jump: the others end up to per cents away from the nearest point around.
LAST = Hop(trust_region_steps, 0.0, 40)


class Hops:
    """Hops from the starts of inputs; the kinds share the passes of an input in proportion to their gains there.

    Starts move only if they get nearer.
    """

    def __init__(self, oracle: BoundaryOracle, *, batch: int) -> None:
        self._oracle, self._batch = oracle, batch
        self._kinds = HOPS[oracle.threat_model.norm]
        # Of each kind of hop and input, what it gained for a pass, and its passes.
        shape = (2, len(oracle.inputs), len(self._kinds))
        self._gains, self._spent = torch.zeros(shape, dtype=torch.float64, device=oracle.inputs.device)

    def __call__(self, state: SearchState, *, going: Going) -> SearchState:
        """Return the starts after a hop, of one kind for each input."""
        oracle, samples, kinds = self._oracle, state.sample_index, self._chosen()
        passes, nearest = oracle.passes.clone(), oracle.nearest.clone()
        points, distances = state.points.clone(), state.distances.clone()
        for number, hop in enumerate(self._kinds):
            rows = state.promising(hop.most or len(samples), kinds == number)
            if len(rows):
                latest = self.made(hop, state.select(rows), going=going)
                points[rows], distances[rows] = latest.points, latest.distances
                self._learn(number, samples[rows], passes, nearest)
        return replace(state, points=points, distances=distances)

    def made(self, hop: Hop, state: SearchState, *, going: Going) -> SearchState:
        """Return the starts after a hop of this kind."""
        oracle, bounds, samples = self._oracle, self._oracle.threat_model.bounds, state.sample_index
        away = random_jump(state.points, oracle.inputs[samples], state.streams, length=hop.length, bounds=bounds)
        more = {"limits": oracle.nearest[samples]} if hop.limited else {}
        return stepped(oracle, state, away, hop.take, steps=hop.steps, going=going, batch=self._batch, **more)

    def _chosen(self) -> Tensor:
        """Return the kind of hop that is farthest below its share of passes for each input, int64 ``(N,)``."""
        total = self._gains.sum(1, keepdim=True)
        shares = _LEAST + torch.where(total > 0, self._gains / total, 0)
        kinds: Tensor = (self._spent / shares).argmin(1)
        return kinds

    def _learn(self, number: int, samples: Tensor, passes: Tensor, nearest: Tensor) -> None:
        samples = torch.unique(samples)
        spent = (self._oracle.passes - passes)[samples].double()
        gained = (1 - self._oracle.nearest[samples] / nearest[samples]).nan_to_num(0, 0, 0) / spent.clamp_min(1)
        self._gains[samples, number] = torch.maximum(gained, self._gains[samples, number] * _FADING)
        self._spent[samples, number] += spent


def random_jump(
    points: Tensor, inputs: Tensor, streams: Sequence[torch.Generator], *, length: float, bounds: tuple[float, float]
) -> Tensor:
    """Move each point ``(B, ...)`` in a random direction by ``length`` times its perturbation's l2 norm, clipped."""
    offsets = (points - inputs).flatten(1)
    drawn = torch.stack([torch.randn(offsets.shape[1], generator=one) for one in streams]).to(offsets)
    drawn *= length * offsets.norm(dim=1, keepdim=True) / drawn.norm(dim=1, keepdim=True).clamp_min_(1e-12)
    return (points.flatten(1) + drawn).clamp_(*bounds).view_as(points)
