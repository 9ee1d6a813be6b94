"""The random attack: how hard the planted points are to find without looking (R-ASR, section 3.1).

Points are drawn within the ball and where points are planted, in alternation, until one is adversarial. Each is sent
through the network once and measured by every readout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from robust_ext.core.random import derive_seed, stream
from robust_ext.evaluations.binarization.defense import Defense
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.evaluations.binarization.settings import BinarizationSettings

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
    alive = [i for i in range(len(first.samples)) if bool(separable[i].any())]
    for number, (inner, corners) in enumerate(_rounds(settings)):
        size = max(1, forward.rows // (inner + corners))
        for group in (alive[start : start + size] for start in range(0, len(alive), size)):
            points = torch.cat(
                [_draw(first.inputs[i], first.samples[i], settings, number, inner, corners) for i in group]
            )
            index = torch.tensor(group, device=device).repeat_interleave(inner + corners)
            measured = forward(points)
            reach = torch.stack([problem.reach(measured, index) for problem in problems], 1)
            reach = torch.where(separable[index], reach, -torch.inf)
            if defense is not None:
                hits = (reach > boundary).any(1).nonzero().squeeze(1)
                if len(hits):
                    seed = derive_seed(
                        settings.seed_of_judge, first.samples[group[0]], "random detector", defense.test, number
                    )
                    reach[hits[defense.rejects(points[hits], seed=seed)]] = -torch.inf
            best[group] = torch.maximum(best[group], reach.view(len(group), -1, len(problems)).amax(1))
            draws[group] += inner + corners
        solved = (best > boundary.clamp_min(deepest)) | ~separable
        alive = [i for i in alive if not bool(solved[i].all())]
        if not alive:
            break
    return best, draws


def _rounds(settings: BinarizationSettings) -> list[tuple[int, int]]:
    """Numbers of inner and corner points of each round, in the proportion of the totals."""
    total = settings.random_inner + settings.random_corners
    count = -(-total // _ROUND)
    edges = [(settings.random_inner * i // count, settings.random_corners * i // count) for i in range(count + 1)]
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(edges)]


def _draw(x: Tensor, sample: int, settings: BinarizationSettings, number: int, inner: int, corners: int) -> Tensor:
    threat_model = settings.threat_model
    planted = threat_model.sample_corners if settings.corners else threat_model.sample_surface
    return torch.cat(
        [
            threat_model.sample_inner(
                x, inner, generator=stream(settings.seed_of_judge, sample, "random inner", number)
            ),
            planted(x, corners, generator=stream(settings.seed_of_judge, sample, "random corners", number)),
        ]
    )
