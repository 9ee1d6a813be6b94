"""Plain projected gradient ascent on a loss that says nothing of success, which is looked for beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from robust_ext.attacks._common.best_tracker import Queries, Task
from robust_ext.attacks._common.detector_aware_steps import start_of, step_along
from robust_ext.attacks.native import Step
from robust_ext.core.validation import check_choice

REFERENCES = ("nearest", "mean")

Ask = Callable[[Tensor], tuple[Tensor, Tensor]]


def climb(
    task: Task,
    queries: Queries,
    ask: Ask,
    *,
    steps: int,
    step_size: float,
    restarts: int,
    start: str,
    check_every: int,
) -> Tensor:
    """Climb from each start; the best points that were judged.

    Args:
        task: What the attack is asked to do.
        queries: Who judges points.
        ask: From points ``(N, ...)`` to a loss ``(N,)`` and its gradient ``(N, ...)``.
        steps: In each run.
        step_size: Relative to epsilon, see :func:`step_along`.
        restarts: Runs.
        start: See :func:`start_of`.
        check_every: The start, every so many-th point after it and the last are judged.
    """
    for restart in range(restarts):
        points = start_of(task, start=start, restart=restart)
        for number in range(steps):
            if number % check_every == 0:
                queries.judge(points)
            value, gradient = ask(points)
            if task.watch is not None:
                at = restart * steps + number
                task.watch(Step(number=at, total=restarts * steps, points=points, loss=value, gradient=gradient))
            points = step_along(task, points, gradient, size=step_size)
        queries.judge(points)
    return queries.result()


def choose_reference(groups: list[Tensor], own: Tensor, how: str) -> Tensor:
    """What to match, ``(N, F)``: the nearest of the references, or their mean.

    Args:
        groups: What each row's first, second, ... reference looks like, R times ``(N, F)``.
        own: What the inputs look like, ``(N, F)``.
        how: One of :data:`REFERENCES`.
    """
    check_choice("reference", how, REFERENCES)
    every = torch.stack(groups, 1)
    if how == "mean":
        return every.mean(1)
    nearest = (every - own[:, None]).square().sum(2).argmin(1)
    return every[torch.arange(len(every), device=every.device), nearest]
