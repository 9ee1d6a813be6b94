"""Attacks by hand, right and wrong; functions of this module, so that processes of their own can be given them."""

import torch
from torch.nn.functional import cross_entropy


def _gradient(logits, y, x, weights=None):
    return torch.autograd.grad(cross_entropy(logits, y, weights, reduction="sum"), x)[0]


def _project(points, x, epsilon, bounds=(0, 1)):
    return (x + (points - x).clamp(-epsilon, epsilon)).clamp(*bounds)


def pgd(model, x, y, *, epsilon, steps=41, step=0.1, targeted=False, bounds=(0, 1), labels="given", stop=None, reach=1):
    """Sign-gradient PGD on cross-entropy from the clean input; its settings after ``step`` are its faults.

    ``step`` is relative to epsilon, below 0 it descends; ``targeted`` takes labels for classes to aim at; ``bounds``
    are what it clamps to; ``labels`` are ``"given"`` or ``"predicted"`` at each step; all rows stop once more than a
    share ``stop`` is fooled; it returns to a ball of ``reach`` epsilons.
    """
    points = x.clone()
    for _ in range(steps):
        points.requires_grad_(True)
        logits = model(points)
        if not logits.requires_grad:
            return x
        if stop is not None and (logits.argmax(1) != y).float().mean() > stop:
            break
        gradient = _gradient(logits, logits.argmax(1) if labels == "predicted" else y, points)
        points = points.detach() + (-step if targeted else step) * epsilon * gradient.sign()
        points = _project(points, x, reach * epsilon, bounds)
    return points.detach()


def swinging(model, x, y, *, epsilon, keep="last"):
    """Climbs where a point is right, goes back elsewhere, as DDN; keeps the ``"last"`` or ``"best"`` point."""
    points, best = x.clone(), x.clone()
    for _ in range(40):
        points.requires_grad_(True)
        logits = model(points)
        fooled = logits.argmax(1) != y
        best[fooled] = points.detach()[fooled]
        ahead = _project(points.detach() + 0.1 * epsilon * _gradient(logits, y, points).sign(), x, epsilon)
        points = torch.where(fooled.view(-1, 1, 1, 1), x + 0.6 * (points.detach() - x), ahead)
    found = model(points).argmax(1) != y
    best[found] = points[found]
    return points if keep == "last" else best


def ascending(model, x, y, *, epsilon, steps=40, step=0.1, fault=None):
    """Sign steps on cross-entropy from the clean input, with a momentum that adds up normalised gradients.

    A ``fault``: ``"momentum"`` subtracts it; ``"normalised"`` standardises inputs that the model takes as they are;
    ``"rounded"`` keeps points on the grid of 8 bits; ``"named"`` looks up what is not there; ``"ten"`` has weights for
    ten classes; ``"batch"`` divides the step by the rows; ``"early"`` ends where the loss rises by less than a tenth of
    itself; ``"fading"`` takes a step that gets shorter by a third.
    """
    points, velocity, before = x.clone(), torch.zeros_like(x), None
    settings = {"mean": 0.5, "std": 0.01}
    for number in range(steps):
        points = points.detach().requires_grad_(True)
        if fault == "named":
            settings.pop("deviation")
        shown = (points - settings["mean"]) / settings["std"] if fault == "normalised" else points
        logits = model(shown)
        gradient = _gradient(logits, y, points, torch.ones(10) if fault == "ten" else None)
        gradient = gradient / gradient.abs().sum((1, 2, 3), keepdim=True).clamp_min(1e-30)
        loss = float(cross_entropy(logits.detach(), y, reduction="sum"))
        if fault == "early" and before is not None and loss < before * 1.1 + 0.1:
            break
        way = gradient - velocity if fault == "momentum" else gradient + velocity
        before, velocity = loss, velocity + gradient
        size = step * epsilon / (len(x) if fault == "batch" else 1) * (0.66**number if fault == "fading" else 1)
        points = _project(points.detach() + size * way.sign(), x, epsilon)
        if fault == "rounded":
            points = (points * 255).round() / 255
    return points.detach()
