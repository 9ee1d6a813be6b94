"""How the attacks that know the detector start and move: steps of a stated length, projected."""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks._common.best_tracker import Task
from robust_ext.attacks._common.projections import project
from robust_ext.attacks._common.rows import l2_normalize
from robust_ext.core.validation import check_choice

STARTS = ("random", "input")
STEPS = ("l2", "sign")


def start_of(task: Task, *, start: str, restart: int = 0) -> Tensor:
    """Where a run begins, ``(N, ...)``.

    Args:
        task: The inputs, the threat model and each row's generator.
        start: ``"random"``: uniform in the ball, clipped to the bounds. ``"input"``: the inputs in the first run,
            random points in those that follow.
        restart: Number of the run.
    """
    check_choice("start", start, STARTS)
    if start == "input" and restart == 0:
        return task.inputs.clone()
    pairs = zip(task.inputs, task.streams, strict=True)
    return torch.cat([task.threat_model.sample_inner(row, 1, generator=stream) for row, stream in pairs])


def step_along(task: Task, points: Tensor, direction: Tensor, *, size: float, kind: str = "") -> Tensor:
    """Go some way along a direction, and back to the nearest point that the threat model allows.

    Args:
        task: The inputs and the threat model.
        points: ``(N, ...)``.
        direction: ``(N, ...)``, of any length; rows of zeros stay where they are.
        size: Length of the step relative to epsilon.
        kind: ``"sign"``: ``size x epsilon`` in every value. ``"l2"``: along the direction itself, with a Euclidean
            length of ``size x epsilon``; for linf times the root of the number of values, which is the length of a step
            of signs. Left out: ``"sign"`` for linf, ``"l2"`` for the other norms.
    """
    threat_model = task.threat_model
    length = size * threat_model.epsilon
    flat = direction.flatten(1)
    if kind == "sign" or (not kind and threat_model.norm == "linf"):
        moved = flat.sign()
    else:
        moved = l2_normalize(flat)
        if threat_model.norm == "linf":
            length *= flat.shape[1] ** 0.5
    return project(points + moved.view(points.shape) * length, task.inputs, threat_model)
