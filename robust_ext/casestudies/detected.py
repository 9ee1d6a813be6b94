"""What the case studies with a detector have in common: the network, and how a detector sees blind attacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.casestudies.base import CaseStudy, Measurement, Recipe
from robust_ext.casestudies.measuring import attacked
from robust_ext.casestudies.networks import small_features
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.threat import ThreatModel
from robust_ext.defenses.training.loop import train_network
from robust_ext.detectors.base import Detector

_FEATURES = 256
# Training images that are kept with the network, to fit its detector on.
_KEPT = 600


class DetectedNetwork(nn.Module):
    """Features (layer ``"features"``), a linear layer, and some of the clean images that it was trained on."""

    kept_inputs: Tensor
    kept_labels: Tensor

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.features = small_features(shape, _FEATURES)
        self.head = nn.Linear(_FEATURES, classes)
        self.register_buffer("kept_inputs", torch.zeros(_KEPT, *shape))
        self.register_buffer("kept_labels", torch.zeros(_KEPT, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, K)`` of ``(N, *shape)``."""
        out: Tensor = self.head(self.features(x))
        return out

    def keep(self, inputs: Tensor, labels: Tensor) -> None:
        """Keep the first training images, in turn where they are too few."""
        rows = torch.arange(_KEPT, device=inputs.device) % len(inputs)
        self.kept_inputs, self.kept_labels = inputs[rows].clone(), labels[rows].clone()


def passes(inputs: Tensor, small: int, large: int) -> int:
    """Passes over the training images: of 8 x 8 there are few, and they cost little."""
    return small if inputs[0].numel() < 200 else large


def misclassified(
    module: nn.Module, attack: Attack, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
) -> Tensor:
    """Those candidates ``(M, ...)`` of an attack on the classifier alone that are misclassified."""
    found = attacked(module, attack, inputs, labels, threat_model, seed=seed)
    with torch.no_grad():
        return found[module(found).argmax(1) != labels]


def seen_by(detector: Detector, clean: Tensor, candidates: Tensor, *, seed: int) -> dict[str, float]:
    """How a detector tells candidates ``(M, ...)`` from clean inputs ``(N, ...)``.

    ``"AUROC"`` is the share of pairs in which the candidate scores higher (ties count half), ``"flagged"`` the share of
    candidates above 95% of the clean scores; both are 0 where there are no candidates.
    """
    if not len(candidates):
        return {"AUROC": 0.0, "flagged": 0.0}
    with seeded_globals(derive_seed(seed, "seen by a detector")), torch.no_grad():
        natural, scores = (detector.score(points) for points in (clean, candidates))
    above = (scores[:, None] > natural).double() + (scores[:, None] == natural).double() / 2
    limit = natural.quantile(0.95)
    return {"AUROC": float(above.mean()), "flagged": float((scores > limit).double().mean())}


class DetectorStudy(CaseStudy):
    """An ordinary network beside a detector, which a subclass makes; the right recipe is orthogonal PGD.

    Attributes:
        blind: The attack of the authors, which ignores the detector.
        least_auroc: What the detector has to reach against it.
        steps: Of orthogonal PGD.
    """

    blind: ClassVar[Attack]
    least_auroc: ClassVar[float]
    steps: ClassVar[int] = 100
    causes: ClassVar[tuple[str, ...]] = ()

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        """See :meth:`CaseStudy.build`."""
        return DetectedNetwork(shape, classes)

    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """By cross-entropy."""

        def loss(rows: Tensor) -> Tensor:
            return nn.functional.cross_entropy(module(inputs[rows]), labels[rows])

        train_network(module, len(inputs), loss, epochs=passes(inputs, 30, 6), batch_size=32)
        cast(DetectedNetwork, module).keep(inputs, labels)

    def measure(
        self, module: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
    ) -> Measurement:
        """How the blind attack looks to a detector that is fitted on images kept from the training."""
        network = cast(DetectedNetwork, module)
        detector = self.detector(network, network.kept_inputs, network.kept_labels, seed=seed)
        assert detector is not None
        candidates = misclassified(
            module, self.blind, inputs, labels, threat_model, seed=derive_seed(seed, "blind candidates")
        )
        values = seen_by(detector, inputs, candidates, seed=seed)
        words = f"AUROC of the candidates of {self.blind.name} against clean inputs, at least {self.least_auroc}"
        return Measurement(values=values, present=values["AUROC"] >= self.least_auroc, words=words)

    def right(self, threat_model: ThreatModel) -> Recipe:
        """Orthogonal PGD."""
        return Recipe(
            attack=f"robust_ext:OrthogonalPGD(steps={self.steps})",
            words="Orthogonal PGD on classifier and detector, one at a time and each without moving the other.",
        )
