"""Trapdoor: a network trained to react to triggers, with a detector that rejects inputs that look like a trigger.

Sources: Shan, Wenger, Wang, Li, Zheng and Zhao, "Gotta Catch 'Em All: Using Honeypots to Catch Adversarial Attacks on
Neural Networks" (2020); Bryniarski et al., "Evading Adversarial Example Detection Defenses with Orthogonal Projected
Gradient Descent" (2021); Zimmermann et al. 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.casestudies.base import Measurement, Published, Recipe, Trained
from robust_ext.casestudies.detected import DetectedNetwork, DetectorStudy, orthogonal_pgd
from robust_ext.core.random import stream
from robust_ext.detectors.trapdoor import TrapdoorDetector
from robust_ext.detectors.triggers import Triggers, make_triggers, train_epoch

# Least share of test inputs whose class the triggers decide.
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


class Trapdoor(DetectorStudy[TrapdoorNetwork]):
    """A network with trapdoors and a detector that compares activations with those of triggered inputs."""

    network = TrapdoorNetwork
    title = "Trapdoor"
    source = "Shan, Wenger, Wang, Li, Zheng and Zhao 2020"
    epsilons: ClassVar = {"digits": 0.1, "mnist": 0.05, "cifar10": 8 / 255}
    published = Published(weak_score="< .95", right_score="< .95")
    published_in = "Zimmermann et al. 2022, section 4"
    blind = ObjectivePGD(steps=100, rel_step_size=0.08)
    least_auroc = 0.8
    weak = Recipe(attack=blind, words="PGD on the cross-entropy, 100 steps of .08 epsilon, that ignores the detector")
    right = orthogonal_pgd("steps=300")
    settings: ClassVar = {"planting_tries": 2000}
    notes = (
        "In the authors' code the planted point is verified under one random mask of neurons and the attack judged "
        "under another; here the detector compares all neurons. Their 750 steps of .015 are those of epsilon .031, not "
        ".01, and their last iterate is never scored."
    )

    def train(self, module: TrapdoorNetwork, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """Train for a few passes without triggers, then for more in which every second image carries one."""
        generator = stream(seed, 0, "trapdoors")
        triggers = make_triggers(len(module.masks), tuple(inputs.shape[1:]), generator=generator)
        module.masks, module.patterns = triggers.masks, triggers.patterns
        module.keep(inputs, labels)
        first, then = (2, 16) if inputs.shape[-1] >= 16 else (6, 30)
        for ratio, rate, count in ((0.0, 1e-3, first), (0.5, 1e-3, then), (0.5, 2e-4, 3)):
            optimizer = torch.optim.Adam(module.parameters(), lr=rate)
            for _ in range(count):
                train_epoch(module, optimizer, inputs, labels, triggers, generator=generator, injection_ratio=ratio)

    def detector(self, module: TrapdoorNetwork, inputs: Tensor, labels: Tensor, *, seed: int) -> TrapdoorDetector:
        """Return a detector of the cosine to the signatures, over all features."""
        detector = TrapdoorDetector(module, layer="features")
        detector.fit(inputs[:1000], module.triggers)
        return detector

    def measure(self, case: Trained[TrapdoorNetwork]) -> Measurement:
        """Measure how often triggers work, and how the detector sees blind PGD."""
        works = TrapdoorDetector(case.module, layer="features").fit(case.inputs, case.module.triggers)
        success = float(works.mean())
        values = {"success of triggers": success, **self.seen(case, seed=case.seed)}
        present = success >= _SUCCESS and values["AUROC"] >= self.least_auroc
        words = (
            f"triggers decide the class of at least {_SUCCESS:.0%} of test inputs, and the AUROC of the candidates of "
            f"blind PGD against clean inputs is at least {self.least_auroc}"
        )
        return Measurement(values=values, present=present, words=words)
