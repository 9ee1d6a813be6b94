"""Witnesses: points that prove a problem with a deeper boundary to have a solution.

This project's own attacks look for them, on the judge's side, and raise the reach itself, which goes on beyond any
boundary: APGD (Croce and Hein 2020); the same with the mean gradient over points nearby, where gradients are shattered
(Athalye et al. 2018); and Square (Andriushchenko et al. 2020) from the planted point, where they are of no use at all.
What they return is verified like any candidate, through the whole network.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack
from robust_ext.attacks.square import Square
from robust_ext.core.errors import AttackError, ModelError
from robust_ext.core.guard import frozen
from robust_ext.core.machine import OutOfMemory
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.target import Target
from robust_ext.engine.task import Work
from robust_ext.engine.verify import verify
from robust_ext.evaluations.binarization.attacking import Attacked, ProblemAttack
from robust_ext.evaluations.binarization.defense import Defense
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.evaluations.binarization.readout_settings import DepthSettings
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.defended import SuccessMargin


@dataclass
class Deepest:
    """The deepest verified point ``(...)`` of each sample and its reach, by id."""

    name: str = ""  # Of the attack that found them.
    reach: dict[int, float] = field(default_factory=dict)
    points: dict[int, Tensor] = field(default_factory=dict)

    def take(self, other: Deepest) -> None:
        """Keep what is deeper than what is there."""
        for sample, value in other.reach.items():
            if value > self.reach.get(sample, 0.0):
                self.reach[sample], self.points[sample] = value, other.points[sample]

    def beyond(self, sample: int, depth: float) -> bool:
        """Return whether a problem of this depth is known to have a solution."""
        return self.reach.get(sample, 0.0) > depth


def pose_deeper(
    problems: Problems,
    attacks: Mapping[str, ProblemAttack],
    results: Mapping[str, Attacked],
    known: Deepest,
    depths: tuple[float, ...],
) -> Work[None]:
    """Run attacks at these depths, increasing, and add what they did to their records.

    ``results`` are those of the test itself, of these attacks and others; ``known`` are the deepest points of the
    project's own attacks. Problems that an attack's earlier candidates solve are not posed to it again, and an attack
    that solves nothing at a depth is not run at further ones. Attacks that imitate references are not run: these need
    not be class 1 beyond a deeper boundary.
    """
    own = {name: _verified(result) for name, result in results.items()}
    for name, result in results.items():
        known.take(own[name])
        if name in attacks:
            for sample, record in result.records.items():
                record |= {"deepest": own[name].reach.get(sample), "depths": []}
    solving = {name: bool(own[name].reach) for name in attacks}
    for depth in depths:
        rows = [row for row, sample in enumerate(problems.samples) if known.beyond(sample, depth)]
        if not rows:
            break
        points = torch.stack([known.points[problems.samples[row]] for row in rows])
        deeper = replace(problems.select(rows), planted=points[:, None])
        found: list[Deepest] = []
        for name, attack in attacks.items():
            if attack.attack.traits.references:
                continue
            deep = replace(attack, depth=depth, canaries=frozenset())
            found.append((yield from _attack(deep, deeper, results[name], own[name], run=solving[name])))
            solving[name] = any(_solved(record, depth) for record in results[name].records.values())
        # After all of them: the problems of a depth do not depend on the order of the attacks.
        for one in found:
            known.take(one)


def _attack(attack: ProblemAttack, problems: Problems, result: Attacked, own: Deepest, *, run: bool) -> Work[Deepest]:
    """One attack at one depth; what it found is added to its own points, and returned."""
    assert attack.depth is not None
    depth = attack.depth
    posed = [row for row, sample in enumerate(problems.samples) if result.records[sample]["outcome"] != "not_planted"]
    left = [row for row in posed if not own.beyond(problems.samples[row], depth)]
    again = Attacked()
    if run and left:
        again = yield from attack.run(problems.select(left))
        result.add(again.spent)
    for row in posed:
        sample = problems.samples[row]
        result.records[sample]["depths"].append({"depth": depth, **_entry(again, sample, own, depth)})
    found = _verified(again)
    own.take(found)
    for sample in found.reach:
        result.records[sample]["deepest"] = own.reach[sample]
    return found


def _entry(again: Attacked, sample: int, own: Deepest, depth: float) -> dict[str, Any]:
    """Return the outcome of a problem, as in a record, or ``"not_run"``."""
    if own.beyond(sample, depth):
        return {"outcome": "found", "reach": own.reach[sample]}
    if sample not in again.records:
        return {"outcome": "not_run", "reach": None}
    return {key: again.records[sample][key] for key in ("outcome", "reach")}


def _solved(record: Mapping[str, Any], depth: float) -> bool:
    return any(entry["depth"] == depth and entry["outcome"] == "found" for entry in record["depths"])


def _verified(result: Attacked) -> Deepest:
    """The points that an attack found and their reach."""
    good = {sample: record["reach"] for sample, record in result.records.items() if record["outcome"] == "found"}
    reach = {sample: value for sample, value in good.items() if value is not None}
    return Deepest(reach=reach, points={sample: result.candidates[sample] for sample in reach})


logger = logging.getLogger(__name__)

# A detector's score margin is scaled to so much reach: where it is about to reject, it is the ascended term.
_STEEP = 100.0
# Of the points nearby that gradients are averaged over: their distance in epsilons, and how many there are.
_NOISE, _DRAWS = 0.5, 4


class BeyondBoundary(nn.Module):
    """A classifier whose logits ``(B, 2)`` are the distances of a batch of problems beyond a position.

    They are ``-+ (reach - position) / 2``, for any shape of the readout's own logits: an attack on class 0 that
    raises their difference goes on beyond every boundary.
    """

    def __init__(self, features: nn.Module, problems: Problems, position: float) -> None:
        super().__init__()
        self.features = features
        self.position = position
        self._problems = problems
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Logits of inputs ``(B, ...)``, row by row those of the problems."""
        rows = torch.arange(len(x), device=x.device)
        past = self._problems.reach(self.features(x), rows) - self.position
        return torch.stack([-past, past], 1).float() / 2


def searchers(settings: DepthSettings, *, images: bool, detector: bool) -> list[Attack]:
    """The attacks that look for witnesses."""
    found: list[Attack] = []
    if settings.witness_steps:
        found.append(APGD(steps=settings.witness_steps, loss="margin"))
    # Queries of a detector may each take many of the network's.
    if settings.witness_steps and not detector:
        half = APGD(steps=max(settings.witness_steps // 2, 1), loss="margin")
        found.append(AdaptedAttack(attack=half, noise=_NOISE, eot=_DRAWS))
    if settings.witness_queries and images and not detector:
        found.append(Square(queries=settings.witness_queries, stop_early=False))
    return found


def find_witnesses(
    features: nn.Module,
    problems: Problems,
    settings: BinarizationSettings,
    *,
    defense: Defense | None = None,
    searched: nn.Module | None = None,
) -> Iterator[Deepest]:
    """Look for points of great reach in B problems, all at once; only what verifies is kept.

    Attacks run on a faster copy of the features where one is ``searched``; the features themselves verify.

    Verified means: in bounds and ball, beyond the test's own boundary through the whole network, and with a detector
    not rejected. Where one attack reaches the problem before the deepest that is posed, the next ones are not needed.
    """
    sample, images = problems.samples[0], problems.inputs.dim() == 4
    judge = settings.seed_of_judge
    for attack in searchers(settings, images=images, detector=defense is not None):
        if not problems.samples:
            return
        inputs = problems.inputs
        module = BeyondBoundary(features, problems, settings.boundary_position)
        attacked = BeyondBoundary(features if searched is None else searched, problems, settings.boundary_position)
        key = (judge, sample, "witness", attack.name, *(() if defense is None else (defense.test,)))
        labels = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        with frozen(module), frozen(attacked), seeded_globals(derive_seed(*key, "globals")):
            target = Target(
                module=attacked if defense is None else _success(attacked, defense, inputs),
                bounds=settings.threat_model.bounds,
                classes=2,
                input_shape=tuple(inputs.shape[1:]),
                device=inputs.device,
                starting_points=problems.planted,
            )
            try:
                points = attack.search(
                    target, inputs, labels, threat_model=settings.threat_model, generator=stream(*key)
                )
            except (AttackError, ModelError, OutOfMemory) as error:
                # As where no gradient comes back from the model, or from the mean of its draws; there are others.
                logger.info("no witness by %s: %s", attack.name, error)
                continue
            seed = derive_seed(*key, "verdict")
            found = verify(
                points,
                inputs,
                labels,
                module=module,
                threat_model=settings.threat_model,
                attack=attack.name,
                rejects=None if defense is None else partial(defense.rejects, seed=seed),
            )
        past = ((found.logits[:, 1] - found.logits[:, 0]).double() + module.position).tolist()
        good = [row for row, outcome in enumerate(found.outcomes) if outcome == "found"]
        reach = {problems.samples[row]: past[row] for row in good}
        yield Deepest(attack.name, reach, {problems.samples[row]: found.candidates[row] for row in good})
        # A sample more or less at the last depth is not worth two further attacks.
        deep = (settings.depths[1:] or settings.depths)[-2:][0]
        problems = problems.select([r for r, one in enumerate(problems.samples) if reach.get(one, 0.0) <= deep])


def _success(module: nn.Module, defense: Defense, inputs: Tensor) -> SuccessMargin:
    """Two logits that are above each other where a point lies beyond the boundary and is not rejected."""
    defended = defense.defended(module)
    with torch.no_grad():
        margins = defense.detector.score_margin(inputs)
    usual = float(margins[torch.isfinite(margins)].abs().median()) if bool(torch.isfinite(margins).any()) else 1.0
    defended.weight = _STEEP / max(usual, 1e-9)
    return SuccessMargin(defended, 0)
