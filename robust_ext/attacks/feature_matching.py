"""Feature matching: looking, to the layers that a detector watches, like a clean point of another class.

Sources: Sabour, Cao, Faghri, Fleet, "Adversarial Manipulation of Deep Representations" (2016), section 3, for linf and
one layer; Tramer, Carlini, Brendel, Madry, "On Adaptive Attacks to Adversarial Example Defenses" (2020), for its use
against detectors; Zimmermann et al., "Increasing Confidence in Adversarial Robustness Evaluations" (2022), section 4.1,
who add a term for the classifier, and make 500 steps of 0.0012 at epsilon 0.03.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks._common.best_tracker import Queries, Task, gradient_of, no_classifier_gradients
from robust_ext.attacks._common.detector_aware import AwareAttack
from robust_ext.attacks._common.detector_aware_steps import STARTS
from robust_ext.attacks._common.objectives import margin
from robust_ext.attacks._common.projected_ascent import REFERENCES, choose_reference, climb
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.feature_maps import FeatureMap, Features, check_features, feature_map
from robust_ext.core.validation import check_choice, check_integer, check_number

# Differences of zero have no scale; every other difference is far above.
_LEAST = 1e-12


def _squared(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum(1)


def _largest(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().amax(1)


def _angle(a: Tensor, b: Tensor) -> Tensor:
    return 1 - torch.nn.functional.cosine_similarity(a, b, dim=1)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"l2": _squared, "linf": _largest, "cosine": _angle}


class FeatureMatching(AwareAttack):
    """Projected gradient steps that pull the features of each row to those of a reference point.

    Maximised is ``weight x min(margin, confidence) / r - distance(features(x), features(reference)) / d``, where r is
    the range of the logits and d the distance, both at the input, so that the terms are alike in size whatever the
    network. Each layer's features are divided by the length of the references' features there. The detector's score
    is not followed, and needs no gradients; points are judged beside the ascent, and of those that were, the
    misclassified one of lowest excess is kept, a success if there was one (the one of highest margin where none was
    misclassified).

    Each step is one forward and one backward pass through the features for each of the ``samples``, with a ``weight``
    one forward and backward pass more through the classifier, and ``samples`` forward passes more where a point is
    judged. Before, inputs and references go forward once each, and the inputs once more with a ``weight``.

    Targets need a detector and references (:attr:`Target.references`), of which the misclassification is to come: for
    targeted attacks they should be of the classes aimed at.

    Args:
        features: Names of layers of the detector's classifier, as in ``classifier.named_modules()``, one or more; or a
            callable from inputs ``(N, ...)`` to features ``(N, F)``. Left out: the detector's method ``features`` where
            it has one, or else what enters its classifier's last linear layer.
        distance: ``"l2"`` (squared), ``"linf"`` or ``"cosine"``.
        reference: Which of several references a row is pulled to: the ``"nearest"`` in features to the input, or the
            ``"mean"`` of their features.
        weight: Of the classifier's term, at least 0.
        confidence: Margin in logits above which the classifier's term is content.
        steps: In each run, at least 1.
        step_size: Relative to epsilon: of signs for linf, of the gradient's direction for l2 and l1.
        restarts: Runs from starts of their own.
        start: ``"random"`` or ``"input"``.
        samples: Calls that are averaged, for random detectors and features.
        check_every: How often points are judged, in steps. Where the detector is as cheap as the features, 1.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> FeatureMatching(features=["layer3", "layer4"], distance="cosine", steps=100).settings["features"]
        ('layer3', 'layer4')
    """

    name = "FeatureMatching"
    traits = AttackTraits(batching="full", detector=True, references=True, failure="best", seeds="generator")
    uses_scores = False

    def __init__(
        self,
        *,
        features: Features = None,
        distance: str = "l2",
        reference: str = "nearest",
        weight: float = 1.0,
        confidence: float = 0.0,
        steps: int = 500,
        step_size: float = 0.04,
        restarts: int = 1,
        start: str = "random",
        samples: int = 1,
        check_every: int = 1,
    ) -> None:
        self.settings = {
            "features": check_features(features),
            "distance": check_choice("distance", distance, DISTANCES),
            "reference": check_choice("reference", reference, REFERENCES),
            "weight": check_number("weight", weight, minimum=0),
            "confidence": check_number("confidence", confidence, minimum=0),
            "steps": check_integer("steps", steps, minimum=1),
            "step_size": check_number("step_size", step_size, minimum=0, open_minimum=True),
            "restarts": check_integer("restarts", restarts, minimum=1),
            "start": check_choice("start", start, STARTS),
            "samples": check_integer("samples", samples, minimum=1),
            "check_every": check_integer("check_every", check_every, minimum=1),
        }

    def solve(self, task: Task) -> Tensor:
        """See :meth:`AwareAttack.solve`."""
        chosen = self.settings
        features = feature_map(task.defended.detector, chosen["features"], task.inputs[:1])
        loss = _MatchingLoss(task, features, chosen)
        ways = {key: chosen[key] for key in ("steps", "step_size", "restarts", "start", "check_every")}
        queries = Queries(task, name=self.name, samples=chosen["samples"])
        return climb(task, queries, loss, **ways)


class _MatchingLoss:
    """The loss and its gradient, averaged over calls."""

    def __init__(self, task: Task, features: FeatureMap, chosen: Mapping[str, Any]) -> None:
        assert task.references is not None
        self._task, self._features = task, features
        self._distance = DISTANCES[chosen["distance"]]
        self._weight, self._confidence = chosen["weight"], chosen["confidence"]
        self._samples = chosen["samples"]
        with torch.no_grad():
            # One batch in row order for each reference: the features may depend on the row.
            groups = [features(points.clone()) for points in task.references.unbind(1)]
            own = features(task.inputs.clone())
            lengths = [torch.stack(parts).norm(dim=2).mean(0) for parts in zip(*groups, strict=True)]
            self._scales = [length.clamp_min(_LEAST)[:, None] for length in lengths]
            mine = self._joined(own)
            self._wanted = choose_reference([self._joined(group) for group in groups], mine, chosen["reference"])
            self._far = self._distance(mine, self._wanted).clamp_min(_LEAST)
            if self._weight:
                logits = task.defended.classifier(task.inputs.clone())
                self._range = (logits.amax(1) - logits.amin(1)).clamp_min(_LEAST)

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        values, gradients = [], []
        for _ in range(self._samples):
            with torch.enable_grad():
                x = points.detach().clone().requires_grad_(True)
                value = -self._distance(self._joined(self._features(x)), self._wanted) / self._far
                missing = (
                    "FeatureMatching: the features give no gradients; name others, or choose an attack that asks for "
                    "decisions only"
                )
                gradient = gradient_of(value, x, missing)
                if self._weight:
                    y = points.detach().clone().requires_grad_(True)
                    extra = self._weight * self._gain(y)
                    gradient = gradient + gradient_of(extra, y, no_classifier_gradients("FeatureMatching"))
                    value = value + extra
            values.append(value.detach())
            gradients.append(gradient)
        return torch.stack(values).mean(0), torch.stack(gradients).mean(0)

    def _gain(self, x: Tensor) -> Tensor:
        task = self._task
        gained = margin(task.defended.classifier(x), task.labels)
        wanted: Tensor = (-gained if task.targeted else gained).clamp_max(self._confidence) / self._range
        return wanted

    def _joined(self, groups: list[Tensor]) -> Tensor:
        return torch.cat([group / scale for group, scale in zip(groups, self._scales, strict=True)], 1)
