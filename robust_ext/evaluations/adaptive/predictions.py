"""The predictions that candidates are judged by: right or not, finite or not, and by which margin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robust_ext.core.criteria import MISCLASSIFICATION, Criterion
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.task import Attempt, Key
from robust_ext.engine.verify import Verification, verify
from robust_ext.evaluations.detectors import NamedDetector, flagged
from robust_ext.models.adaptive import AdaptiveDefense

Predictions = tuple[Tensor, Tensor, Tensor]
"""Whether predictions are right, and whether logits are finite, bool ``(n,)``, and margins ``(n,)``."""


def predict(
    module: Callable[[Tensor], Tensor],
    points: Tensor,
    goals: Tensor,
    *,
    criterion: Criterion = MISCLASSIFICATION,
    classes: Tensor | None = None,
) -> Predictions:
    """Return predictions on points; one is right where the point is not adversarial by the criterion.

    Clean points have to be right by their true ``classes`` too. What is not finite is wrong.
    """
    with torch.no_grad():
        logits = module(points)
    finite = torch.isfinite(logits).all(1)
    right = ~criterion.adversarial(logits, goals) & finite
    right = right if classes is None else right & criterion.correct(logits, classes)
    return right, finite, criterion.margin(logits, goals)


def predict_afresh(
    defense: AdaptiveDefense,
    points: Tensor,
    goals: Tensor,
    *,
    ids: Sequence[int],
    seed: int,
    keys: Sequence[Key],
    criterion: Criterion = MISCLASSIFICATION,
    classes: Tensor | None = None,
) -> Predictions:
    """One prediction of a defense, as :func:`predict` returns it, with draws of its own for these ``keys``.

    The draws of a row are those of its sample, of these ``ids``, in any batch.
    """
    seeds = torch.tensor([derive_seed(seed, one, *keys) for one in ids])

    def defended(x: Tensor) -> Tensor:
        found = defense.solution(x, seeds=seeds)
        return defense.logits(found.final, found.state)

    # Modules inside may draw from the global generators.
    with seeded_globals(derive_seed(seed, ids[0], *keys)):
        module = defended if defense.random else defense
        return predict(module, points, goals, criterion=criterion, classes=classes)


@dataclass(frozen=True, kw_only=True)
class Judge:
    """What points of some rows are judged by: the static model, and fresh draws of the defense."""

    given: EvaluationInputs  # Whose criterion counts
    defense: AdaptiveDefense
    name: str  # Of the attack, for error texts
    goals: Tensor  # What attacks are given as labels, int64 (n,)
    ids: Sequence[int]  # Of the samples
    seed: int
    classes: Tensor | None = None  # The true classes, of clean points
    detector: NamedDetector | None = None  # Where it flags a point, nothing is broken

    def __call__(self, points: Tensor, *keys: Key) -> Predictions:
        """Predict by the static model, or with keys by one draw of the defense."""
        shared: dict[str, Any] = {"criterion": self.given.criterion, "classes": self.classes}
        if keys:
            afresh: dict[str, Any] = {"ids": self.ids, "seed": self.seed, "keys": keys}
            found = predict_afresh(self.defense, points, self.goals, **afresh, **shared)
        else:
            found = predict(self.defense.classifier, points, self.goals, **shared)
        if self.detector is None:
            return found
        flags, (right, finite, margins) = flagged(self.detector, points, seed=self.seed, sample=self.ids[0]), found
        return right | flags, finite, margins.where(~flags, margins.clamp_max(0))

    def verify(self, points: Tensor, inputs: Tensor) -> Verification:
        """Check points as the static model sees them."""
        shared: dict[str, Any] = {"threat_model": self.given.threat_model, "criterion": self.given.criterion}
        return verify(points, inputs, self.goals, module=self.defense.classifier, attack=self.name, **shared)

    def choose(self, inputs: Tensor, attempt: Attempt) -> tuple[Tensor, Tensor]:
        """Return the points that judge static model and defense: candidates, and witnesses where they break down.

        What breaks the rules is no attempt: the clean input stands in its place.
        """
        judged = _admissible(attempt.verified, inputs)
        if attempt.witnesses is None:
            return judged, judged
        witnesses = _where(torch.isfinite(attempt.witnesses).flatten(1).all(1), attempt.witnesses.to(judged), judged)
        points = _admissible(self.verify(witnesses, inputs), judged)

        def chosen(*keys: Key) -> Tensor:
            (right, *_), (still, finite, _) = self(judged, *keys), self(points, *keys)
            return _where(right & ~still & ~finite, points, judged)

        return chosen(), chosen("test time witnesses")


def _admissible(found: Verification, others: Tensor) -> Tensor:
    """Candidates that the rules allow, and other points in place of those that they do not."""
    allowed = [outcome in ("found", "not_adversarial", "non_finite_logits") for outcome in found.outcomes]
    return _where(torch.tensor(allowed, device=others.device), found.candidates, others)


def _where(rows: Tensor, points: Tensor, others: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (others.dim() - 1)), points, others)
