"""The network of the case studies with a detector, and the detector's view of blind attacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.casestudies.base import CaseStudy, Measurement, Recipe, Trained
from robust_ext.casestudies.networks import Training, small_features
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.detectors.base import Detector

_FEATURES = 256
# Training images that stay with the network, to fit its detector on.
_KEPT = 600


class DetectedNetwork(nn.Module):
    """Features (layer ``"features"``), a linear layer, and some of the clean training images."""

    kept_inputs: Tensor
    kept_labels: Tensor

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.features = small_features(shape, _FEATURES)
        self.head = nn.Linear(_FEATURES, classes)
        self.register_buffer("kept_inputs", torch.zeros(_KEPT, *shape))
        self.register_buffer("kept_labels", torch.zeros(_KEPT, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``(N, K)`` of ``(N, *shape)``."""
        out: Tensor = self.head(self.features(x))
        return out

    def keep(self, inputs: Tensor, labels: Tensor) -> None:
        """Keep the first training images, repeated if they are too few."""
        rows = torch.arange(_KEPT, device=inputs.device) % len(inputs)
        self.kept_inputs, self.kept_labels = inputs[rows].clone(), labels[rows].clone()


N = TypeVar("N", bound=DetectedNetwork)


def seen_by(detector: Detector, clean: Tensor, candidates: Tensor, *, seed: int) -> dict[str, float]:
    """Measure how well a detector separates candidates ``(M, ...)`` from clean inputs ``(N, ...)``.

    ``"AUROC"`` is the share of pairs in which the candidate scores higher (ties count half), ``"flagged"`` the share of
    candidates above 95% of the clean scores; both are 0 without candidates.
    """
    if not len(candidates):
        return {"AUROC": 0.0, "flagged": 0.0}
    with seeded_globals(derive_seed(seed, "seen by a detector")), torch.no_grad():
        natural, scores = (detector.score(points) for points in (clean, candidates))
    above = (scores[:, None] > natural).double() + (scores[:, None] == natural).double() / 2
    limit = natural.quantile(0.95)
    return {"AUROC": float(above.mean()), "flagged": float((scores > limit).double().mean())}


class DetectorStudy(CaseStudy[N]):
    """An ordinary network with a detector, which a subclass makes; the right recipe is orthogonal PGD.

    Attributes:
        blind: The attack of the authors, which ignores the detector.
        least_auroc: AUROC that the detector has to reach against it.
    """

    blind: ClassVar[Attack]
    least_auroc: ClassVar[float]
    training = Training(epochs=(30, 6), batch_size=32)

    def train(self, module: N, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """Train by cross-entropy and keep some of the images."""
        self.training.run(module, inputs, labels, partial(self.loss, module))
        module.keep(inputs, labels)

    def seen(self, case: Trained[N], *, seed: int) -> dict[str, float]:
        """Run the blind attack with a seed of its own; score it by a detector fitted on the kept images."""
        network = case.module
        detector = self.detector(network, network.kept_inputs, network.kept_labels, seed=case.seed)
        assert detector is not None
        candidates = replace(case, seed=seed).misclassified(self.blind)
        return seen_by(detector, case.inputs, candidates, seed=case.seed)

    def measure(self, case: Trained[N]) -> Measurement:
        """Measure how the detector sees the blind attack."""
        values = self.seen(case, seed=derive_seed(case.seed, "blind candidates"))
        words = f"AUROC of the candidates of {self.blind.name} against clean inputs, at least {self.least_auroc}"
        return Measurement(values=values, present=values["AUROC"] >= self.least_auroc, words=words)


def orthogonal_pgd(settings: str = "steps=100") -> Recipe:
    """Return the right recipe against a detector, with the settings of the attack as text."""
    return Recipe(
        attack=f"robust_ext:OrthogonalPGD({settings})",
        words="Orthogonal PGD on classifier and detector, one at a time and each without moving the other.",
    )
