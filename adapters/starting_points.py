"""Points that are already adversarial, for attacks that begin there."""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.core.target import Target
from robust_ext.core.validation import check_integer


def starting_points(
    target: Target, inputs: Tensor, labels: Tensor, *, generator: torch.Generator, tries: int = 200
) -> tuple[Tensor, Tensor]:
    """Search the box for points of another class: noise, and blends of it with the input that come ever closer to it.

    Every query is the whole batch ``(N, ...)`` in order. Noise, uniform and black and white by turns, is drawn (at
    most ``tries`` times) until each sample is misclassified; then each sample goes as far back to its input as it stays
    misclassified (ten halvings). Returned are points ``(N, ...)`` and which of them are adversarial, bool ``(N,)``; the
    others are the inputs.
    """
    check_integer("tries", tries, minimum=1)
    low, high = target.bounds
    shape = (-1, *[1] * (inputs.dim() - 1))
    points, found = inputs.clone(), torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    for number in range(tries):
        noise = torch.rand(inputs.shape, generator=generator)
        drawn = (noise if number % 2 == 0 else noise.round()) * (high - low) + low
        drawn = drawn.to(inputs.device, inputs.dtype).clamp_(low, high)
        new = ~found & _wrong(target, torch.where(found.view(shape), points, drawn), labels)
        points = torch.where(new.view(shape), drawn, points)
        found |= new
        if bool(found.all()):
            break
    kept = torch.ones(len(inputs), device=inputs.device)
    left = torch.zeros_like(kept)
    for _ in range(10):
        middle = (kept + left) / 2
        adversarial = _wrong(target, torch.lerp(inputs, points, middle.view(shape)), labels)
        kept, left = torch.where(adversarial, middle, kept), torch.where(adversarial, left, middle)
    return torch.where(found.view(shape), torch.lerp(inputs, points, kept.view(shape)), inputs), found


def _wrong(target: Target, points: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        wrong: Tensor = target.module(points).argmax(1) != labels
    return wrong
