"""What a case study consists of: a small version of a published defense, and two recipes to evaluate it by.

Source: Zimmermann, Brendel, Tramer and Carlini, "Increasing Confidence in Adversarial Robustness Evaluations" (2022),
section 4 and appendix B, where thirteen published evaluations are tested.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.threat import ThreatModel
from robust_ext.detectors.base import Detector


@dataclass(frozen=True, kw_only=True)
class Published:
    """Numbers of the literature on a defense, as shares; None where none is stated.

    Args:
        clean: Accuracy on clean images.
        claimed: Robust accuracy by its authors' evaluation.
        true: Robust accuracy by a better one.
        weak_score: Test score of the authors' recipe in the paper, or a bound in words.
        right_score: Test score of the improved recipe.
        flagged: Whether the paper's test flags the authors' recipe.
        source: Where the numbers are from.
    """

    clean: float | None = None
    claimed: float | None = None
    true: float | None = None
    weak_score: float | str | None = None
    right_score: float | str | None = None
    flagged: bool = True
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to evaluate a defense.

    Args:
        attack: Anything :func:`robust_ext.as_attack` takes; a string, where one will do.
        words: What it does and, for a weak one, what is wrong with it, in a sentence.
        settings: Settings of :func:`robust_ext.binarization_test` beside those of the case study, such as
            ``exposure`` for a recipe that sees the detector.
        train_mode: Whether the model is evaluated in train mode, as one of the authors did.
    """

    attack: object
    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    train_mode: bool = False


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What shows that the mechanism which fooled the authors is there.

    Args:
        values: What was measured, by name, such as ``"share of zero gradients"``.
        present: Whether it is there.
        words: What is measured and the limit, in a sentence.
    """

    values: Mapping[str, float]
    present: bool
    words: str


class CaseStudy(ABC):
    """A small version of a published defense with the recipe of its authors and a right one; one file a defense.

    Attributes:
        title: Of the defense.
        source: Who published it.
        epsilons: Budget in linf by the name of the dataset, for inputs in [0, 1].
        published: Numbers of the literature.
        causes: Codes of :data:`robust_ext.evaluations.causes.finding.CODES` that name what is wrong with the recipe
            of its authors.
        settings: Settings of :func:`robust_ext.binarization_test` that the defense needs, such as ``readout``.
        notes: What the authors' code or the paper's measured wrongly, and what the right measure gives.
    """

    title: ClassVar[str]
    source: ClassVar[str]
    epsilons: ClassVar[Mapping[str, float]] = {"digits": 0.1, "mnist": 0.1, "cifar10": 8 / 255}
    published: ClassVar[Published]
    causes: ClassVar[tuple[str, ...]]
    settings: ClassVar[Mapping[str, Any]] = {}
    notes: ClassVar[str] = ""

    @abstractmethod
    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        """The untrained defense, from inputs ``(N, *shape)`` in [0, 1] to logits ``(N, classes)``."""

    @abstractmethod
    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """Train it on inputs ``(N, *shape)`` and labels ``(N,)``; it is in eval mode afterwards.

        Minutes on a core for 5,000 images of 28 x 28, seconds for the digits.
        """

    @abstractmethod
    def measure(
        self, module: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
    ) -> Measurement:
        """Measure the mechanism that fooled the authors, on test inputs ``(N, *shape)`` and labels ``(N,)``."""

    @abstractmethod
    def weak(self, threat_model: ThreatModel) -> Recipe:
        """The recipe of the authors."""

    @abstractmethod
    def right(self, threat_model: ThreatModel) -> Recipe:
        """One that finds what is there."""

    def parts(self, module: nn.Module) -> object:
        """What :func:`robust_ext.binarization_test` is given as the model: the module, or a pair of modules.

        A pair is (features, readout), where features may be of any shape that the readout of ``settings`` takes.
        """
        return module

    def judged(self, module: nn.Module, *, seed: int) -> nn.Module:
        """What robust accuracy is judged by, from inputs to logits: the module itself, unless it is random.

        Then it is one whose prediction is that of the majority or the mean of many seeded draws.
        """
        return module

    def detector(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> Detector | None:
        """The detector beside it, fitted on training inputs and labels and without a threshold; None without one."""
        return None

    def trained(self, inputs: Tensor, labels: Tensor, *, seed: int = 0) -> nn.Module:
        """Build the defense and train it; what is drawn comes from the seed."""
        classes = int(labels.max()) + 1
        with seeded_globals(derive_seed(seed, self.title, "training")), torch.enable_grad():
            module = self.build(tuple(inputs.shape[1:]), classes)
            self.train(module, inputs, labels, seed=seed)
        return module.eval()
