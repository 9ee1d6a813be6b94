"""The random attack: how hard the planted points are to find without looking (R-ASR, section 3.1).

Points are drawn within the ball and where points are planted, in alternation, until one is adversarial. Each is sent
through the network once and measured by every readout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from robust_ext.core.random import derive_seed
from robust_ext.evaluations.binarization.defense import Defense
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.points import keys_of
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
    alive = [row for row, good in enumerate(separable.any(1).tolist()) if good]
    for number, (inner, corners) in enumerate(_rounds(settings)):
        if not alive:
            break
        each = len(inner) + len(corners)
        size = max(1, forward.rows // each)
        groups = (alive[start : start + size] for start in range(0, len(alive), size))
        # The device is waited for at the end of a round, and not within one.
        for group, rows in zip(groups, torch.split(torch.tensor(alive, device=device), size), strict=True):
            ids = [first.samples[row] for row in group]
            points = _draw(first.inputs[rows], ids, settings, inner, corners).flatten(0, 1)
            index = rows.repeat_interleave(each)
            measured = forward(points)
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
