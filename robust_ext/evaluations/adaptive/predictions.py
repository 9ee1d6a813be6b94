"""The predictions that candidates are judged by: right or not, finite or not, and by which margin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from robust_ext.attacks._common.objectives import margin
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.engine.task import Key
from robust_ext.models.adaptive import AdaptiveDefense


def predict(module: Callable[[Tensor], Tensor], points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether predictions are right, and whether logits are finite, bool ``(n,)``, and margins ``(n,)``.

    Those that are not finite are wrong. A margin is the highest other logit less the label's.
    """
    with torch.no_grad():
        logits = module(points)
    finite = torch.isfinite(logits).all(1)
    return (logits.argmax(1) == labels) & finite, finite, margin(logits, labels)


def predict_afresh(
    defense: AdaptiveDefense, points: Tensor, labels: Tensor, *, ids: Sequence[int], seed: int, keys: Sequence[Key]
) -> tuple[Tensor, Tensor, Tensor]:
    """One prediction of a defense, as :func:`predict` returns it, with draws of its own for these ``keys``.

    The draws of a row are those of its sample, of these ``ids``, in any batch.
    """
    seeds = torch.tensor([derive_seed(seed, one, *keys) for one in ids])

    def defended(x: Tensor) -> Tensor:
        found = defense.solution(x, seeds=seeds)
        return defense.logits(found.final, found.state)

    # Modules inside may draw from the global generators.
    with seeded_globals(derive_seed(seed, ids[0], *keys)):
        return predict(defended if defense.random else defense, points, labels)
