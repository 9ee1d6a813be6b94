"""From samples to posed problems: points are measured, readouts fitted, and random search shows how hard they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.engine.progress import Phases, phase
from robust_ext.evaluations.binarization.defense import Defense, Drawn
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.problems import Problems, fit, measure
from robust_ext.evaluations.binarization.random_attack import random_reach
from robust_ext.evaluations.binarization.settings import BinarizationSettings


@dataclass(frozen=True)
class Posed:
    """The problems of a group of samples; where random search came to in each, by id."""

    problems: Problems | None  # Those that are separable; None where nothing could be drawn to be planted.
    reach: dict[int, float]  # The best reach of the random points; nothing where none were drawn.
    draws: dict[int, int]  # How many were drawn.


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
    *,
    defense: Defense | None = None,
    random: bool = True,
) -> Posed:
    """Pose the problems of inputs ``(B, ...)`` with these ids; ``drawn`` is what to plant, where a detector decides.

    Without ``random``, there is no random search in them.
    """
    usable = [row for row in range(len(samples)) if drawn is None or drawn[row].candidates is not None]
    if not usable:
        return Posed(None, {}, {})
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
    separable = fitted.select([row for row, good in enumerate(fitted.separable.tolist()) if good])
    if not random:
        return Posed(separable, {}, {})
    phase("random attack")
    positions = [settings.boundary_position]
    # On to the deepest problem that may be posed, so that its share of all of them is exact.
    deepest = settings.depths[-1] if len(settings.depths) > 1 else 0.0
    best, counts = random_reach(forward, [fitted], positions, settings, defense=defense, deepest=deepest)
    phases.stop("random")
    reach = dict(zip(fitted.samples, best[:, 0].tolist(), strict=True))
    return Posed(separable, reach, dict(zip(fitted.samples, counts.tolist(), strict=True)))


def _given(parts: Sequence[Tensor | None]) -> list[Tensor]:
    return [part for part in parts if part is not None]
