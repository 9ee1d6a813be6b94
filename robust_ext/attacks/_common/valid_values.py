"""Rounding of candidates to valid values, and the repair of those that rounding undoes.

Greedy coordinate steps along the gradient's sign, as rounding to 8 bits moves each value by less than a step: the
smallest change that can make a rounded point adversarial again is to round some values the other way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import NO_GRADIENTS, gradient_of, hits, over_rows, project, query
from robust_ext.core.criteria import aimed
from robust_ext.core.errors import AttackError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

# Rounds of greedy steps, each with one gradient and a query for each number of entries that is tried.
_ROUNDS = 12


def repair(
    target: Target,
    points: Tensor,
    inputs: Tensor,
    labels: Tensor,
    *,
    threat_model: ThreatModel,
    targeted: bool = False,
) -> Tensor:
    """Round points ``(N, ...)`` to valid values; those that this undoes move on along the gradient's sign.

    Rows whose repair fails come back as they were, so that the judge, who rounds them too, tells what became of them.
    Every query is the whole batch in order.
    """
    rounded, goal = threat_model.snap(points, inputs), target.criterion
    goal = aimed(goal) if targeted else goal
    solved = hits(query(target, rounded), labels, goal)
    undone = ~solved
    if bool(undone.any()):
        undone &= hits(query(target, points), labels, goal)
    current = rounded
    for _ in range(_ROUNDS):
        if not bool((undone & ~solved).any()):
            break
        x = current.detach().requires_grad_(True)
        with torch.enable_grad():
            value = goal.margin(target.module(x), labels)
            try:
                gradient = gradient_of(value, x, AttackError(NO_GRADIENTS))
            except AttackError:
                break
        best, found = value.detach(), current
        for proposed in _proposals(current, gradient, inputs, threat_model):
            valid = threat_model.contains(proposed, inputs) & undone & ~solved
            tried = torch.where(over_rows(valid, inputs), proposed, current)
            gained = goal.margin(query(target, tried), labels)
            better = valid & (gained > best)
            best = torch.where(better, gained, best)
            found = torch.where(over_rows(better, inputs), tried, found)
        if torch.equal(found, current):
            break
        current = found
        solved |= undone & (best > 0)
    # A point that changed nothing before rounding is as good rounded.
    return torch.where(over_rows(undone & ~solved, inputs), points, current)


def _proposals(current: Tensor, gradient: Tensor, inputs: Tensor, threat_model: ThreatModel) -> list[Tensor]:
    """Points where the 1, 2, 4, ... discrete entries of highest gain go one value up the gradient.

    In l2 and l1, where that may leave the ball, also steps of several lengths that are projected and rounded.
    """
    shape, flat, slope = current.shape, current.double().flatten(1), gradient.double().flatten(1)
    low, high = (one.double().flatten(1) for one in threat_model.box(inputs, ball=True))
    step = threat_model.grid(inputs)[1].flatten(1)
    slack = 1e-6 * step.where(step > 0, 1.0)
    moved = flat + slope.sign() * step
    gain = (slope.abs() * step).where((moved >= low - slack) & (moved <= high + slack), -1.0)
    for group in threat_model.groups(inputs):
        # All entries of a group share its gain, so that they are taken together.
        rows, now = slope[:, group], flat[:, group]
        free = ((low < high)[:, group] & (high[:, group] - low[:, group] > 1 - 1e-6)).expand_as(now)
        held = (free & (now == 1)).any(1, keepdim=True)
        others = rows.masked_fill(~free | (now == 1), -torch.inf)
        top, place = others.max(1, keepdim=True)
        gained = (top - (rows * now).sum(1, keepdim=True)).where(held, -1.0).nan_to_num(neginf=-1.0)
        moved[:, group] = torch.zeros_like(now).scatter(1, place, 1.0)
        gain[:, group] = gained.expand_as(now)
    ranked, found = gain.sort(1, descending=True).values, []
    number = 1
    while number <= gain.shape[1]:
        chosen = (gain >= ranked[:, number - 1 : number]) & (gain > 0)
        found.append(torch.where(chosen, moved, flat).to(current.dtype).view(shape))
        number *= 2
    if threat_model.norm != "linf":
        length = torch.linalg.vector_norm(slope, dim=1, keepdim=True).clamp_min(torch.finfo(slope.dtype).tiny)
        for share in (1.0, 0.5, 0.2, 0.1):
            ahead = (flat + share * threat_model.epsilon * slope / length).to(current.dtype).view(shape)
            found.append(threat_model.snap(project(ahead, inputs, threat_model), inputs))
    return found
