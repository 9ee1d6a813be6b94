"""The cost of a sample in the binarization test, from its settings and the attacks' declared costs."""

from __future__ import annotations

from collections.abc import Mapping

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Cost, Costs
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.witnesses import searchers


def planting_cost(settings: BinarizationSettings, *, detector: bool = False) -> Cost:
    """The points of a sample that are measured: exact, unless a detector gives fewer to choose among."""
    planted = settings.boundary_points
    points = settings.inner_points + 1 + planted * settings.planted_candidates
    points += settings.reference_points if detector else 0
    # What is planted in a random model is drawn further times, see Majority.
    further = 0 if settings.draws == 1 else 7 * planted
    return Cost((points + further) * settings.draws)


def sample_costs(
    attacks: Mapping[str, Attack], settings: BinarizationSettings, *, samples: int, images: bool, detector: bool
) -> Costs:
    """Planting, the random attack, witnesses, and each attack at each depth, for one of that many samples, at most.

    What an attack does at further depths, and how long random search goes on, follows from what is found.
    """
    depths, ball, draws = len(settings.depths), settings.threat_model, settings.draws
    checked = (1 + settings.boundary_points + (settings.reference_points if detector else 0)) * draws
    found: Costs = {("calibration", None): Cost(unknown=("the calibration",))} if settings.calibrate_on else {}
    if detector:
        # How many points it is queried for depends on how many it accepts.
        found["accepted", None] = Cost(unknown=("the detector",))
    found["features", None] = planting_cost(settings, detector=detector)
    found["random", None] = Cost((settings.random_inner + settings.random_corners) * draws)
    searching = searchers(settings, images=images, detector=detector) if depths > 1 else []
    if searching:
        costs = [(one.cost(ball, classes=2) or Cost(unknown=(one.name,))) + Cost(draws) for one in searching]
        found["witnesses", None] = sum(costs, Cost())
    times = depths + min(settings.canaries, samples) / samples
    for name, attack in attacks.items():
        found["attack", name] = (attack.cost(ball, classes=2) or Cost(unknown=(name,))) * times
    found["verify", None] = Cost(draws * times + checked * depths) * len(attacks)
    return found
