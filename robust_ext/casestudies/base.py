"""The parts of a case study: a small version of a published defense, and two recipes that evaluate it.

Source: Zimmermann, Brendel, Tramer and Carlini, "Increasing Confidence in Adversarial Robustness Evaluations" (2022),
section 4 and appendix B, which test thirteen published evaluations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import Loss, cross_entropy
from robust_ext.attacks.base import Attack
from robust_ext.attacks.running import run_attack
from robust_ext.casestudies.networks import Parts, Training
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice
from robust_ext.detectors.base import Detector

M = TypeVar("M", bound=nn.Module)
Figure = tuple[str, str, float | str | None, float | None]
"""A row and a quantity, the paper's figure (or a bound as text) and ours."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Figures of the literature on a defense, as shares; None where the literature has none.

    Args:
        clean: Accuracy on clean images.
        claimed: Robust accuracy by its authors' evaluation.
        true: Robust accuracy by a better one.
        weak_score: Test score of the authors' recipe in the paper, or a bound as text.
        right_score: Test score of the improved recipe.
        flagged: Whether the paper's test flags the authors' recipe.
    """

    clean: float | None = None
    claimed: float | None = None
    true: float | None = None
    weak_score: float | str | None = None
    right_score: float | str | None = None
    flagged: bool = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An attack on a defense.

    Args:
        attack: Anything :func:`robust_ext.as_attack` takes.
        words: A sentence on the attack and, for a weak one, on its fault.
        train_mode: Whether the model is evaluated in train mode, as by the authors of one defense.
    """

    attack: object
    words: str
    train_mode: bool = False


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Evidence that the mechanism which misled the authors is present.

    Args:
        values: Measured values by name, such as ``"share of zero gradients"``.
        present: Whether the mechanism is present.
        words: A sentence on the values and their limits.
    """

    values: Mapping[str, float]
    present: bool
    words: str


@dataclass(frozen=True, kw_only=True)
class Trained(Generic[M]):
    """A trained defense with test images, and the tools to measure its mechanism.

    Args:
        module: The defense, in eval mode.
        inputs: Test images, float32 ``(N, *shape)`` in [0, 1].
        labels: Their classes, int64 ``(N,)``.
        threat_model: Norm and budget.
        seed: Seed of every draw.
    """

    module: M
    inputs: Tensor
    labels: Tensor
    threat_model: ThreatModel
    seed: int

    def logits(self, points: Tensor | None = None, *, module: nn.Module | None = None) -> Tensor:
        """Return the logits ``(N, K)`` of points, or of the inputs, without gradients."""
        with torch.no_grad():
            logits: Tensor = (module or self.module)(self.inputs if points is None else points)
        return logits

    def accuracy(self, points: Tensor, *, module: nn.Module | None = None) -> float:
        """Return the share of points ``(N, ...)`` that are classified as their labels."""
        return float((self.logits(points, module=module).argmax(1) == self.labels).double().mean())

    def gradients(
        self, points: Tensor | None = None, *, loss: Loss = cross_entropy, module: nn.Module | None = None
    ) -> Tensor:
        """Return the gradients of a loss at points, or at the inputs, ``(N, D)``."""
        x = (self.inputs if points is None else points).clone().requires_grad_(True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(loss((module or self.module)(x), self.labels).sum(), x)
        return gradient.flatten(1)

    def nearby(self, *purpose: str) -> Tensor:
        """Draw one uniform point from the ball of each input, ``(N, ...)``."""
        keys = [derive_seed(self.seed, row, *purpose) for row in range(len(self.inputs))]
        return self.threat_model.sample_inner(self.inputs, 1, key=keys)[:, 0]

    def attacked(self, attack: Attack) -> Tensor:
        """Return the candidates ``(N, ...)`` of an attack on the classifier, not verified."""
        x, given, classes = self.inputs, self.threat_model, self.logits(self.inputs[:1]).shape[1]
        target = Target(
            module=self.module, bounds=given.bounds, classes=classes, input_shape=tuple(x.shape[1:]), device=x.device
        )
        generator = stream(self.seed, 0, "attacked")
        return run_attack(attack, target, x, self.labels, threat_model=given, generator=generator)

    def misclassified(self, attack: Attack) -> Tensor:
        """Return the candidates ``(M, ...)`` of an attack on the classifier that are misclassified."""
        found = self.attacked(attack)
        return found[self.logits(found).argmax(1) != self.labels]


class CaseStudy(ABC, Generic[M]):
    """A small version of a published defense with the recipe of its authors and a right one; one file a defense.

    Attributes:
        network: Class of the untrained defense, made from the shape of an input and the number of classes.
        title: Name of the defense.
        source: Its authors.
        epsilons: Budget in linf by the name of the dataset, for inputs in [0, 1].
        published: Figures of the literature.
        published_in: Source of the figures.
        weak: The recipe of the authors.
        right: A recipe that finds the adversarial examples that exist.
        causes: Codes of :data:`robust_ext.evaluations.causes.finding.CODES` that name the fault of the authors' recipe.
        training: Settings of the training.
        settings: Settings of :func:`robust_ext.binarization_test` that the defense needs, such as ``readout``.
        notes: Errors in the authors' code or the paper's, and the result of the right measurement.
    """

    network: Callable[[Sequence[int], int], M]
    title: ClassVar[str]
    source: ClassVar[str]
    epsilons: ClassVar[Mapping[str, float]] = {"digits": 0.1, "mnist": 0.1, "cifar10": 8 / 255}
    published: ClassVar[Published]
    published_in: ClassVar[str] = ""
    weak: ClassVar[Recipe]
    right: ClassVar[Recipe]
    causes: ClassVar[tuple[str, ...]] = ()
    training: ClassVar[Training]
    settings: ClassVar[Mapping[str, Any]] = {}
    notes: ClassVar[str] = ""

    def build(self, shape: Sequence[int], classes: int) -> M:
        """Return the untrained defense, from inputs ``(N, *shape)`` in [0, 1] to logits ``(N, classes)``."""
        return self.network(shape, classes)

    @abstractmethod
    def measure(self, case: Trained[M]) -> Measurement:
        """Measure the mechanism that misled the authors."""

    def loss(self, module: M, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean training loss of a batch, ``()``: the cross-entropy, unless overridden."""
        return nn.functional.cross_entropy(module(inputs), labels)

    def train(self, module: M, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """Train the defense on inputs ``(N, *shape)`` and labels ``(N,)``; leave it in eval mode."""
        self.training.run(module, inputs, labels, partial(self.loss, module), seed=seed)

    def parts(self, module: M) -> object:
        """Return the model for :func:`robust_ext.binarization_test`: the module, or its features and readout."""
        return (module.features, module.readout) if isinstance(module, Parts) else module

    def judged(self, module: M, *, seed: int) -> nn.Module:
        """Return the module that decides robust accuracy, from inputs to logits: the defense, unless it is random.

        For a random defense, the module predicts the majority or the mean of many seeded draws.
        """
        return module

    def detector(self, module: M, inputs: Tensor, labels: Tensor, *, seed: int) -> Detector | None:
        """Return the detector, fitted on training inputs and labels, without a threshold; None if there is none."""
        return None

    def threat_model(self, data: str) -> ThreatModel:
        """Return the threat model on a dataset; InvalidArgumentError where the defense has no budget for it."""
        if data not in self.epsilons:
            known = ", ".join(self.epsilons)
            raise InvalidArgumentError("data", data, f"one that {self.title} has a budget for: {known}")
        return ThreatModel(norm="linf", epsilon=self.epsilons[data])

    def budget(self, inputs: Tensor) -> float:
        """Return epsilon for images ``(N, C, H, W)`` of one of the datasets."""
        return self.epsilons[{8: "digits", 28: "mnist"}.get(inputs.shape[-1], "cifar10")]

    def trained(self, inputs: Tensor, labels: Tensor, *, seed: int = 0) -> M:
        """Build and train the defense; every draw comes from the seed."""
        with seeded_globals(derive_seed(seed, self.title, "training")), torch.enable_grad():
            module = self.build(tuple(inputs.shape[1:]), int(labels.max()) + 1)
            self.train(module, inputs, labels, seed=seed)
        return module.eval()


CASE_STUDIES = {
    "thermometer": "thermometer:Thermometer",
    "k_winners": "k_winners:KWinners",
    "feature_scattering": "feature_scattering:FeatureScattering",
    "pcl": "pcl:PrototypeConformity",
    "mixup_inference": "mixup_inference:MixupInference",
    "empir": "empir:Empir",
    "curriculum": "curriculum:Curriculum",
    "adversarial_interpolation": "adversarial_interpolation:AdversarialInterpolation",
    "ecoc": "ecoc:ErrorCorrectingCodes",
    "mmc": "mmc:MaxMahalanobis",
    "odds": "detected:Odds",
    "trapdoor": "detected:Trapdoor",
    "ml_loo": "detected:MLLOO",
}
"""Names of the studies with their files and classes, in the order of the paper's section 4."""


def load_case_study(name: str) -> CaseStudy[Any]:
    """Import and return the case study of a name, one of :data:`CASE_STUDIES`."""
    check_choice("name", name, tuple(CASE_STUDIES))
    file, _, kind = CASE_STUDIES[name].partition(":")
    made: CaseStudy[Any] = getattr(import_module(f"robust_ext.casestudies.{file}"), kind)()
    return made
