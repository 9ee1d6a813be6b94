"""Where the search begins: noise, the nearest images of other classes, or points that are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.state import SearchState
from robust_ext.core.random import stream

# Most draws of noise for a start.
_DRAWS = 10


def initial_state(
    oracle: BoundaryOracle,
    seeds: list[int],
    wanted: Tensor,
    start: str,
    starts: int,
    *,
    batch: int,
    given: Tensor | None,
    pool: Tensor | None,
) -> SearchState:
    """The starts, input by input, as many for each; those that are not adversarial are infinitely far.

    Noise is drawn for the inputs that are wanted, bool ``(N,)``; points ``(N, S, ...)`` may be given besides.
    """
    inputs = oracle.inputs
    parts: list[tuple[Tensor, Tensor]] = []
    if given is not None:
        parts.append(_bisected(oracle, given.flatten(0, 1), _samples(inputs, given.shape[1])))
    if start == "nearest" and pool is not None:
        parts.append(_bisected(oracle, _nearest(oracle, pool, starts, batch), _samples(inputs, starts)))
    if start == "noise":
        samples = _samples(inputs, starts)
        points, found = inputs[samples], torch.zeros(len(samples), dtype=torch.bool, device=inputs.device)
        for rows in torch.split(wanted[samples].nonzero().flatten(), batch):
            streams = [stream(seeds[row // starts], row % starts, "start") for row in rows.tolist()]
            points[rows], found[rows] = _noise(oracle, samples[rows], streams)
        parts.append((points, found))
    count = len(seeds)
    points = torch.cat([points.view(count, -1, *inputs.shape[1:]) for points, _ in parts], 1)
    found = torch.cat([found.view(count, -1) for _, found in parts], 1).flatten()
    samples, points = _samples(inputs, points.shape[1]), points.flatten(0, 1)
    distances = torch.where(found, oracle.distances(points, samples), torch.inf)
    streams = [stream(seed, number, "regions") for seed in seeds for number in range(len(samples) // count)]
    return SearchState(samples, points, distances, streams)


def _samples(inputs: Tensor, count: int) -> Tensor:
    return torch.arange(len(inputs), device=inputs.device).repeat_interleave(count)


def _noise(oracle: BoundaryOracle, sample_index: Tensor, streams: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Noise ``(B, ...)`` moved towards the inputs by bisection, and where it is adversarial; else halfway to the draw.

    Uniform noise and noise of lowest and highest values take turns until a draw is adversarial.
    """
    inputs = oracle.inputs[sample_index]
    low, high = oracle.threat_model.bounds
    points, found = inputs.clone(), torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    for number in range(_DRAWS):
        left = (~found).nonzero().flatten()
        if len(left) == 0:
            break
        noise = torch.stack([torch.rand(inputs.shape[1:], generator=streams[row]) for row in left.tolist()])
        drawn = ((noise if number % 2 == 0 else noise.round()) * (high - low) + low).clamp_(low, high).to(inputs)
        points[left] = drawn
        found[left] = oracle.adversarial(drawn, sample_index[left])
    rows = found.nonzero().flatten()
    points[rows] = oracle.bisect_to_input(points[rows], sample_index[rows])
    return torch.where(found.view(-1, *[1] * (inputs.dim() - 1)), points, torch.lerp(inputs, points, 0.5)), found


def _nearest(oracle: BoundaryOracle, pool: Tensor, count: int, batch: int) -> Tensor:
    """For each input the nearest pool images of its likeliest other classes, ``(N * count, ...)``.

    The first start is of the likeliest class, the next of the second, and so on; once all classes had their turn, the
    second nearest image of each follows. With a targeted attack all are of the class to aim at (Croce, Rauber and
    Hein 2019, section 4). The class of an image is the network's prediction.
    """
    with torch.no_grad():
        clean, logits = (
            torch.cat([oracle.target.module(part) for part in torch.split(images, batch)])
            for images in (oracle.inputs, pool)
        )
    predicted = logits.argmax(1)
    oracle.passes += 1
    # Where there are too few images the input itself stays, from which the first steps may lead somewhere.
    points = oracle.inputs.repeat_interleave(count, 0)
    for row, (label, likely) in enumerate(zip(oracle.labels.tolist(), clean, strict=True)):
        near = oracle.threat_model.distance(pool, oracle.inputs[row].expand_as(pool)).argsort()
        ranked = [c for c in likely.argsort(descending=True).tolist() if c != label]
        members = [near[predicted[near] == c].tolist() for c in ([label] if oracle.targeted else ranked)]
        turns = [images[turn] for turn in range(count) for images in members if turn < len(images)][:count]
        points[row * count : row * count + len(turns)] = pool[turns]
    return points


def _bisected(oracle: BoundaryOracle, points: Tensor, sample_index: Tensor) -> tuple[Tensor, Tensor]:
    """Points ``(B, ...)``, moved towards their inputs where they are adversarial, and which are."""
    # A point that is adversarial only by rounding stays as it is.
    found = oracle.adversarial(points, sample_index, beyond_rounding=False)
    rows = found.nonzero().flatten()
    points = points.clone()
    points[rows] = oracle.bisect_to_input(points[rows], sample_index[rows])
    return points, found
