"""Where the search begins: noise, the nearest images of other classes, or points that are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.judge import Judge
from robust_ext.core.target import Target


def noise_starts(
    judge: Judge, owners: Tensor, streams: Sequence[torch.Generator], *, tries: int = 10
) -> tuple[Tensor, Tensor]:
    """Noise that is adversarial, drawn in towards the input.

    Uniform noise and noise of lowest and highest values take turns until a draw is adversarial.

    Args:
        judge: Asks the network.
        owners: The inputs that starts are wanted for, int64 ``(B,)``.
        streams: A CPU generator for each start.
        tries: Most draws for a start.

    Returns:
        Points ``(B, ...)``, and which of them are adversarial; the others are halfway to the last draw.
    """
    inputs = judge.inputs[owners]
    low, high = judge.threat_model.bounds
    points, found = inputs.clone(), torch.zeros(len(owners), dtype=torch.bool, device=inputs.device)
    for number in range(tries):
        left = (~found).nonzero().flatten()
        if len(left) == 0:
            break
        noise = torch.stack([torch.rand(inputs.shape[1:], generator=streams[row]) for row in left.tolist()])
        drawn = ((noise if number % 2 == 0 else noise.round()) * (high - low) + low).clamp_(low, high).to(inputs)
        points[left] = drawn
        found[left] = judge.adversarial(drawn, owners[left])
    rows = found.nonzero().flatten()
    points[rows] = judge.drawn_in(points[rows], owners[rows])
    return torch.where(found.view(-1, *[1] * (inputs.dim() - 1)), points, torch.lerp(inputs, points, 0.5)), found


def nearest_starts(judge: Judge, pool: Tensor, *, count: int, batch: int) -> tuple[Tensor, Tensor]:
    """For each input the nearest pool images of its likeliest other classes, drawn in towards it.

    The first start is of the likeliest class, the next of the second, and so on; once all classes had their turn, the
    second nearest image of each follows. With a targeted attack all are of the class to aim at (Croce, Rauber and
    Hein 2019, section 4).

    Args:
        judge: Asks the network.
        pool: Images to choose from, ``(P, ...)`` in bounds; their class is what the network says.
        count: Starts for each input.
        batch: Most images asked about at once.

    Returns:
        Points ``(N * count, ...)``, input by input, and which of them are adversarial.
    """
    said = _logits(judge.target, pool, batch).argmax(1)
    clean = _logits(judge.target, judge.inputs, batch)
    judge.passes += 1
    # Where there are too few images, the input itself is left, from which the walk may lead somewhere.
    points = judge.inputs.repeat_interleave(count, 0)
    for row, (label, logits) in enumerate(zip(judge.labels.tolist(), clean, strict=True)):
        ranked = [c for c in logits.argsort(descending=True).tolist() if c != label]
        near = judge.threat_model.distance(pool, judge.inputs[row].expand_as(pool)).argsort()
        classes = [label] if judge.targeted else ranked
        members = [near[said[near] == c].tolist() for c in classes]
        members = [images for images in members if images]
        turns = [images[turn] for turn in range(count) for images in members if turn < len(images)][:count]
        points[row * count : row * count + len(turns)] = pool[turns]
    owners = torch.arange(len(judge.inputs), device=points.device).repeat_interleave(count)
    return adversarial_starts(judge, points, owners)


def adversarial_starts(judge: Judge, points: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """Points as they are, or drawn in towards their inputs where they are adversarial.

    Args:
        judge: Asks the network.
        points: ``(B, ...)`` in bounds.
        owners: int64 ``(B,)``.

    Returns:
        Points, and which of them are adversarial.
    """
    # A point that is adversarial only by rounding stays as it is.
    found = judge.adversarial(points, owners, beyond_rounding=False)
    rows = found.nonzero().flatten()
    points = points.clone()
    points[rows] = judge.drawn_in(points[rows], owners[rows])
    return points, found


def _logits(target: Target, images: Tensor, batch: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([target.module(part) for part in torch.split(images, batch)])
