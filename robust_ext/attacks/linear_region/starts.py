"""The starts of the search: a portfolio of cheap minimisers and points, each with a share of the budget.

Descents and steps along the boundary begin at the input, towards any other class and towards the likeliest ones; noise
and the nearest images of other classes are stepped from along the boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import over_rows
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.plane_steps import fab_steps
from robust_ext.attacks.linear_region.state import SearchRecord, SearchState
from robust_ext.attacks.linear_region.stepping import Steps, descent_steps, proximal_steps, stepped
from robust_ext.core.random import stream

if TYPE_CHECKING:
    from robust_ext.attacks.linear_region.boundary import BoundarySearch

# The share of the budget after which no further start is made, where the search goes on from them.
_UNTIL = 0.4
# Most draws of noise for a start.
_DRAWS = 10
# Kinds of starts from the inputs by norm, the cheapest first: their steps, and how many times the number of the setting
# they take.
_DESCENTS = (("descent", descent_steps, 1), ("boundary", fab_steps, 1))
_FROM_INPUTS: dict[str, tuple[tuple[str, Steps, int], ...]] = {
    "linf": _DESCENTS,
    "l2": _DESCENTS,
    "l1": (("boundary", fab_steps, 1), ("descent", proximal_steps, 4)),
}


@dataclass
class Portfolio:
    """Makes the starts of all inputs, kind by kind, the cheapest first.

    ``given (N, S, ...)`` are points from outside, and ``pool`` has the images for the nearest ones.
    """

    attack: BoundarySearch
    oracle: BoundaryOracle
    found: SearchRecord
    seeds: list[int]
    given: Tensor | None
    pool: Tensor | None

    def starts(self) -> SearchState:
        """Return the starts, infinitely far where nothing is adversarial."""
        oracle, kinds, makers = self.oracle, self.attack.starts, list[Callable[[], SearchState]]()
        chooses = self.attack.target_classes and not (oracle.targeted or oracle.target.criterion.ranks)
        classes = self._likeliest() if chooses else None
        if self.given is not None:
            makers.append(partial(self._from_points, "given", self.given.flatten(0, 1), self.given.shape[1]))
        from_inputs = [one for one in _FROM_INPUTS[oracle.threat_model.norm] if one[0] in kinds]
        makers += [partial(self._from_inputs, *one, None) for one in from_inputs]
        if classes is not None and classes.shape[1]:
            # Proximal starts are long: those at classes gain less than noise and hops do in as many passes.
            aimed = [one for one in from_inputs if one[1] is not proximal_steps]
            makers += [partial(self._from_inputs, *one, classes) for one in aimed]
        if "noise" in kinds:
            makers.append(self._from_noise)
        if "nearest" in kinds:
            makers.append(self._from_nearest)
        parts = []
        for make in makers:
            parts.append(make())
            self.found.add(parts[-1])
        return SearchState.join(parts)

    def _likeliest(self) -> Tensor:
        """Return the likeliest other classes, int64 ``(N, target_classes)`` or fewer; none if only one exists."""
        oracle, others = self.oracle, self.oracle.target.classes - 1
        count = min(self.attack.target_classes, others) if others > 1 else 0
        classes = oracle.labels.new_zeros(len(oracle.inputs), count)
        every = torch.arange(len(classes), device=classes.device)
        for rows in torch.split(every[self._going(every) & (count > 0)], self.attack.batch):
            with torch.no_grad():
                logits = oracle.target.module(oracle.inputs[rows])
            oracle.spend(rows, 1)
            classes[rows] = logits.scatter(1, oracle.labels[rows, None], -torch.inf).topk(count, 1).indices
        return classes

    def _from_inputs(self, kind: str, take: Steps, times: int, classes: Tensor | None) -> SearchState:
        """Return starts from the inputs towards any class, or towards each of these ``(N, K)``."""
        count = 1 if classes is None else classes.shape[1]
        state = self._blank(kind, count, first=0 if classes is None else 1)
        aims = None if classes is None else classes.flatten()
        return self._stepped(state, state.points, take, steps=times * self.attack.start_steps, aims=aims)

    def _from_points(self, kind: str, points: Tensor, count: int) -> SearchState:
        """Return ``count`` starts of each input at points ``(N * count, ...)``, moved towards it if adversarial."""
        state, points = self._blank(kind, count), points.clone()
        # A point that is adversarial only by rounding stays as it is.
        found = self.oracle.adversarial(points, state.sample_index, beyond_rounding=False)
        rows = found.nonzero().flatten()
        points[rows] = self.oracle.bisect_to_input(points[rows], state.sample_index[rows])
        return self._along(state, points, found)

    def _from_nearest(self) -> SearchState:
        assert self.pool is not None
        draws, labels = self.attack.draws, self.attack.pool_labels
        return self._from_points("nearest", _nearest(self.oracle, self.pool, labels, draws, self.attack.batch), draws)

    def _from_noise(self) -> SearchState:
        draws = self.attack.draws
        state = self._blank("noise", draws)
        points, found = state.points.clone(), torch.zeros_like(state.sample_index, dtype=torch.bool)
        for rows in torch.split(self._going(state.sample_index).nonzero().flatten(), self.attack.batch):
            streams = [stream(self.seeds[row // draws], row % draws, "start") for row in rows.tolist()]
            points[rows], found[rows] = _noise(self.oracle, state.sample_index[rows], streams)
        return self._along(state, points, found)

    def _along(self, state: SearchState, points: Tensor, found: Tensor) -> SearchState:
        """Return starts at points, adversarial where found, after steps along the boundary."""
        distances = torch.where(found, self.oracle.distances(points, state.sample_index), torch.inf)
        state = replace(state, points=points, distances=distances)
        return self._stepped(state, points, fab_steps, steps=-(-self.attack.start_steps // 2))

    def _stepped(
        self, state: SearchState, away: Tensor, take: Steps, *, steps: int, aims: Tensor | None = None
    ) -> SearchState:
        if not steps:
            return state
        return stepped(
            self.oracle, state, away, take, steps=steps, going=self._going, batch=self.attack.batch, aims=aims
        )

    def _going(self, sample_index: Tensor) -> Tensor:
        # Where nothing is found yet there is nothing else to spend the budget on.
        known = torch.isfinite(self.oracle.nearest)
        until = torch.where(known, _UNTIL if self.attack.searches_on else 1.0, 1.0)
        return self.found.going(sample_index, until=until)

    def _blank(self, kind: str, count: int, *, first: int = 0) -> SearchState:
        """Return ``count`` starts at each input, infinitely far, numbered from ``first`` within their kind."""
        inputs = self.oracle.inputs
        samples = torch.arange(len(inputs), device=inputs.device).repeat_interleave(count)
        distances = torch.full((len(samples),), torch.inf, dtype=torch.float64, device=inputs.device)
        streams = [stream(seed, number, kind) for seed in self.seeds for number in range(first, first + count)]
        return SearchState.begin(samples, inputs[samples], distances, streams, kind)


def _noise(oracle: BoundaryOracle, sample_index: Tensor, streams: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Return noise ``(B, ...)`` moved towards the inputs by bisection or halfway to the draw, and the adversarial rows.

    Uniform noise and noise of lowest and highest values take turns until a draw is adversarial.
    """
    inputs = oracle.inputs[sample_index]
    low, high = oracle.threat_model.bounds
    points, found = inputs.clone(), torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    for number in range(_DRAWS):
        left = (~found).nonzero().flatten()
        if len(left) == 0:
            break
        noise = torch.stack([torch.rand(inputs.shape[1:], generator=streams[row]) for row in left.tolist()])
        drawn = ((noise if number % 2 == 0 else noise.round()) * (high - low) + low).clamp_(low, high).to(inputs)
        points[left] = drawn
        found[left] = oracle.adversarial(drawn, sample_index[left])
    rows = found.nonzero().flatten()
    points[rows] = oracle.bisect_to_input(points[rows], sample_index[rows])
    return torch.where(over_rows(found, points), points, torch.lerp(inputs, points, 0.5)), found


def _nearest(oracle: BoundaryOracle, pool: Tensor, labels: Tensor | None, count: int, batch: int) -> Tensor:
    """Return the nearest pool images of each input's likeliest other classes, ``(N * count, ...)``.

    The first start is of the likeliest class, the next of the second, and so on; once all classes had their turn, the
    second nearest image of each follows. With a targeted attack all are of the class to aim at (Croce, Rauber and
    Hein 2019, section 4). The class of an image is the network's prediction; with ``labels``, int64 ``(P,)``, images
    that it gets wrong are of no class.
    """
    with torch.no_grad():
        clean, logits = (
            torch.cat([oracle.target.module(part) for part in torch.split(images, batch)])
            for images in (oracle.inputs, pool)
        )
    predicted = logits.argmax(1)
    if labels is not None:
        predicted = torch.where(predicted == labels.to(predicted), predicted, -1)
    oracle.passes += 1
    # Where there are too few images the input itself stays, from which the first steps may lead somewhere.
    points = oracle.inputs.repeat_interleave(count, 0)
    for row, (label, likely) in enumerate(zip(oracle.labels.tolist(), clean, strict=True)):
        near = oracle.threat_model.distance(pool, oracle.inputs[row].expand_as(pool)).argsort()
        ranked = [c for c in likely.argsort(descending=True).tolist() if c != label]
        members = [near[predicted[near] == c].tolist() for c in ([label] if oracle.targeted else ranked)]
        turns = [images[turn] for turn in range(count) for images in members if turn < len(images)][:count]
        points[row * count : row * count + len(turns)] = pool[turns]
    return points
