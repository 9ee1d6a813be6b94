"""From samples to posed problems: measuring, fitting, random search, and their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Cost, Costs
from robust_ext.core.random import derive_seed
from robust_ext.engine.progress import Phases, phase
from robust_ext.evaluations.binarization.defense import Defense, Drawn
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.points import keys_of
from robust_ext.evaluations.binarization.problems import Problems, fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.witnesses import searchers

# Points drawn for a problem before they are evaluated.
_ROUND = 40


def random_reach(
    forward: Forward,
    problems: Sequence[Problems],
    positions: Sequence[float],
    settings: BinarizationSettings,
    *,
    defense: Defense | None = None,
    deepest: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attack versions of the same B problems (other readouts) at random, each until all its versions are solved.

    With ``deepest``, points are drawn until one reaches that deep too.

    A point solves a version when its reach is above the version's position and a detector does not reject it. Returns
    the best reach up to there, float64 ``(B, versions)``, minus infinity where a version is not separable and so not
    attacked, and the number of points drawn for each problem, int64 ``(B,)``.
    """
    first = problems[0]
    device = first.inputs.device
    boundary = torch.tensor(positions, dtype=torch.float64, device=device)
    best = torch.full((len(first.samples), len(problems)), -torch.inf, dtype=torch.float64, device=device)
    draws = torch.zeros(len(first.samples), dtype=torch.int64)
    separable = torch.stack([version.separable for version in problems], 1)
    alive = [row for row, good in enumerate(separable.any(1).tolist()) if good]
    for number, (inner, corners) in enumerate(_rounds(settings)):
        if not alive:
            break
        each = len(inner) + len(corners)
        size = len(alive) if forward.together else max(1, forward.rows // each)
        groups = (alive[start : start + size] for start in range(0, len(alive), size))
        # The device is waited for at the end of a round, and not within one.
        for group, rows in zip(groups, torch.split(torch.tensor(alive, device=device), size), strict=True):
            ids = [first.samples[row] for row in group]
            drawn = _draw(first.inputs[rows], ids, settings, inner, corners)
            points, index = drawn.flatten(0, 1), rows.repeat_interleave(each)
            measured = forward.of_points(drawn).flatten(0, 1)
            reach = torch.stack([problem.reach(measured, index) for problem in problems], 1)
            reach = torch.where(separable[index], reach, -torch.inf)
            if defense is not None:
                hits = (reach > boundary).any(1).nonzero().squeeze(1)
                if len(hits):
                    seed = derive_seed(settings.seed_of_judge, ids[0], "random detector", defense.test, number)
                    reach[hits[defense.rejects(points[hits], seed=seed)]] = -torch.inf
            best[rows] = torch.maximum(best[rows], reach.view(len(rows), -1, len(problems)).amax(1))
            draws[group] += each
        open_rows = ((best <= boundary.clamp_min(deepest)) & separable).any(1).tolist()
        alive = [row for row in alive if open_rows[row]]
    return best, draws


def _rounds(settings: BinarizationSettings) -> list[tuple[range, range]]:
    """Return the inner and corner points of each round, in the proportion of the totals."""
    totals = settings.random_inner, settings.random_corners
    count = -(-sum(totals) // _ROUND)
    edges = [[total * i // count for total in totals] for i in range(count + 1)]
    return [(range(a[0], b[0]), range(a[1], b[1])) for a, b in pairwise(edges)]


def _draw(
    inputs: Tensor, samples: Sequence[int], settings: BinarizationSettings, inner: range, corners: range
) -> Tensor:
    """Points ``(B, inner and corners, ...)`` of samples ``(B, ...)``."""
    ball = settings.threat_model
    planted = ball.sample_corners if settings.corners else ball.sample_surface
    inner_keys, corner_keys = (keys_of(samples, settings, f"random {kind}") for kind in ("inner", "corners"))
    drawn = (
        ball.sample_inner(inputs, len(inner), key=inner_keys, start=inner.start),
        planted(inputs, len(corners), key=corner_keys, start=corners.start),
    )
    return torch.cat(drawn, 1)


def planting_cost(settings: BinarizationSettings, *, detector: bool = False) -> Cost:
    """The points of a sample that are measured: exact, unless a detector gives fewer to choose among."""
    planted = settings.boundary_points
    points = settings.inner_points + 1 + planted * settings.planted_candidates
    points += settings.reference_points if detector else 0
    # Planted points in a random model are drawn again, see Majority.
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


@dataclass(frozen=True)
class Posed:
    """The problems of a group of samples; where random search came to in each, by id."""

    problems: Problems | None  # Those that are separable; None where nothing could be drawn to be planted.
    # By random search, as far as it went: the best reach, and how many points were drawn.
    reach: dict[int, float] = field(default_factory=dict)
    draws: dict[int, int] = field(default_factory=dict)


def fit_problems(
    forward: Forward,
    readout: nn.Module,
    inputs: Tensor,
    samples: Sequence[int],
    settings: BinarizationSettings,
    *,
    candidates: Sequence[Tensor] | None = None,
    references: Tensor | None = None,
    phases: Phases | None = None,
) -> Problems:
    """Measure and fit the problems of inputs ``(B, ...)``, see :mod:`robust_ext.evaluations.binarization.problems`."""
    phase("planting")
    points = measure(forward, inputs, samples, settings, candidates=candidates, references=references)
    if phases is not None:
        phases.stop("features")
    phase("readouts")
    problems = fit(points, readout, settings)
    if phases is not None:
        phases.stop("readout")
    return problems


def pose(
    forward: Forward,
    readout: nn.Module,
    inputs: Tensor,
    samples: Sequence[int],
    drawn: Sequence[Drawn] | None,
    settings: BinarizationSettings,
    phases: Phases,
) -> Posed:
    """Pose the problems of inputs ``(B, ...)`` with these ids; ``drawn`` is what to plant, where a detector decides."""
    usable = [row for row in range(len(samples)) if drawn is None or drawn[row].candidates is not None]
    if not usable:
        return Posed(None)
    fitted = fit_problems(
        forward,
        readout,
        inputs[usable],
        [samples[row] for row in usable],
        settings,
        candidates=None if drawn is None else _given([drawn[row].candidates for row in usable]),
        references=None if drawn is None else torch.stack(_given([drawn[row].references for row in usable])),
        phases=phases,
    )
    return Posed(fitted.select([row for row, good in enumerate(fitted.separable.tolist()) if good]))


def search(
    posed: Posed,
    forward: Forward,
    settings: BinarizationSettings,
    phases: Phases,
    *,
    rows: Sequence[int],
    defense: Defense | None = None,
) -> None:
    """Search some of the problems at random, and add the reach."""
    if posed.problems is None or not rows:
        return
    phase("random attack")
    some = posed.problems.select(rows)
    # On to the deepest problem that may be posed, so that its share of all of them is exact.
    deepest = settings.depths[-1] if len(settings.depths) > 1 else 0.0
    positions = [settings.boundary_position]
    best, counts = random_reach(forward, [some], positions, settings, defense=defense, deepest=deepest)
    phases.stop("random")
    posed.reach.update(zip(some.samples, best[:, 0].tolist(), strict=True))
    posed.draws.update(zip(some.samples, counts.tolist(), strict=True))


def _given(parts: Sequence[Tensor | None]) -> list[Tensor]:
    return [part for part in parts if part is not None]
