"""Trapdoor: a network is trained to react to triggers, and what looks like a trigger inside it is rejected.

Sources: Shan, Wenger, Wang, Li, Zheng and Zhao, "Gotta Catch 'Em All: Using Honeypots to Catch Adversarial Attacks on
Neural Networks" (2020); Bryniarski et al., "Evading Adversarial Example Detection Defenses with Orthogonal Projected
Gradient Descent" (2021); Zimmermann et al. 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.casestudies.base import Measurement, Published, Recipe
from robust_ext.casestudies.detected import DetectedNetwork, DetectorStudy, misclassified, passes, seen_by
from robust_ext.core.random import stream
from robust_ext.core.threat import ThreatModel
from robust_ext.detectors.trapdoor import TrapdoorDetector
from robust_ext.detectors.triggers import Triggers, make_triggers, train_epoch

_SUCCESS = 0.9


class TrapdoorNetwork(DetectedNetwork):
    """A network with the triggers that it is trained to react to, one a class."""

    masks: Tensor
    patterns: Tensor

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__(shape, classes)
        self.register_buffer("masks", torch.zeros(classes, *shape))
        self.register_buffer("patterns", torch.zeros(classes, *shape))

    @property
    def triggers(self) -> Triggers:
        """The triggers."""
        return Triggers(self.masks, self.patterns)


class Trapdoor(DetectorStudy):
    """A network with trapdoors beside a detector that compares activations with those of triggered inputs."""

    title = "Trapdoor"
    source = "Shan, Wenger, Wang, Li, Zheng and Zhao 2020"
    published = Published(weak_score="< .95", right_score="< .95", source="Zimmermann et al. 2022, section 4")
    epsilons: ClassVar[Mapping[str, float]] = {"digits": 0.1, "mnist": 0.05, "cifar10": 8 / 255}
    blind = ObjectivePGD(steps=100, rel_step_size=0.08)
    least_auroc = 0.8
    steps = 300
    settings: ClassVar[Mapping[str, Any]] = {"planting_tries": 2000}
    notes = (
        "In the authors' code the planted point is verified under one random mask of neurons and the attack judged "
        "under another; here the detector compares all neurons. Their 750 steps of .015 are those of epsilon .031, not "
        ".01, and their last iterate is never scored."
    )

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        """See :meth:`CaseStudy.build`."""
        return TrapdoorNetwork(shape, classes)

    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """A few passes without triggers, then more in which every second image carries one."""
        network = cast(TrapdoorNetwork, module)
        generator = stream(seed, 0, "trapdoors")
        triggers = make_triggers(len(network.masks), tuple(inputs.shape[1:]), generator=generator)
        network.masks, network.patterns = triggers.masks, triggers.patterns
        network.keep(inputs, labels)
        first, then = passes(inputs, 6, 2), passes(inputs, 30, 16)
        for ratio, rate, count in ((0.0, 1e-3, first), (0.5, 1e-3, then), (0.5, 2e-4, 3)):
            optimizer = torch.optim.Adam(network.parameters(), lr=rate)
            for _ in range(count):
                train_epoch(network, optimizer, inputs, labels, triggers, generator=generator, injection_ratio=ratio)

    def detector(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> TrapdoorDetector:
        """The cosine to the signatures, over all features."""
        network = cast(TrapdoorNetwork, module)
        detector = TrapdoorDetector(network, layer="features")
        detector.fit(inputs[:1000], network.triggers)
        return detector

    def measure(
        self, module: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
    ) -> Measurement:
        """How often triggers work, and how blind PGD looks to the detector."""
        network = cast(TrapdoorNetwork, module)
        detector = TrapdoorDetector(network, layer="features")
        success = float(detector.fit(inputs, network.triggers).mean())
        detector.fit(network.kept_inputs, network.triggers)
        candidates = misclassified(module, self.blind, inputs, labels, threat_model, seed=seed)
        values = {"success of triggers": success, **seen_by(detector, inputs, candidates, seed=seed)}
        present = success >= _SUCCESS and values["AUROC"] >= self.least_auroc
        words = (
            f"triggers decide the class of at least {_SUCCESS:.0%} of test inputs, and the AUROC of the candidates of "
            f"blind PGD against clean inputs is at least {self.least_auroc}"
        )
        return Measurement(values=values, present=present, words=words)

    def weak(self, threat_model: ThreatModel) -> Recipe:
        """PGD on the classifier alone."""
        return Recipe(
            attack=self.blind,
            words="PGD on the cross-entropy, 100 steps of .08 epsilon, that ignores the detector",
        )
