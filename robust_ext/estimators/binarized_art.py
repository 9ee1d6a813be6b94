"""The binarized classifier as an ART classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from robust_ext.adapters.libraries import load_art
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.verify import Verification
from robust_ext.evaluations.binarization.planting import Planted, plant
from robust_ext.models.padded import PaddedClasses

PyTorchClassifier: Any = load_art().estimators.classification.PyTorchClassifier

_NORMS = {np.inf: "linf", "inf": "linf", "linf": "linf", 2: "l2", "l2": "l2", 1: "l1", "l1": "l1"}


class BinarizedPyTorchClassifier(PyTorchClassifier):  # type: ignore[misc]
    """A ``PyTorchClassifier`` with adversarial examples planted in it, for any ART attack.

    All behaviour lies in its module, so it survives the attacks that make a classifier of their own around
    ``estimator.model`` (APGD with ``loss_type``, AutoAttack, Brendel-Bethge). Start attacks at :attr:`x` with labels
    :attr:`y`, and hand what they return to :meth:`score`. Attacks that query points far from their inputs
    (BoundaryAttack, HopSkipJump and others without gradients) are to be run on one problem at a time: see
    :meth:`single`. ``robust_ext.binarization_test`` does all that by itself, and gives a verdict.

    Args:
        planted: The problems.
        classes: Classes of the classifier: more than two are padding that never wins, for attacks that compare three.
        probabilities: Return the softmax of the logits, for the attacks that need one (NewtonFool, SimBA,
            VirtualAdversarialMethod).

    Source: Zimmermann et al., "Increasing Confidence in Adversarial Robustness Evaluations" (2022), algorithm 1.
    """

    def __init__(self, planted: Planted, *, classes: int = 2, probabilities: bool = False) -> None:
        device = planted.inputs.device
        if device.type not in ("cpu", "cuda"):
            raise ModelError(f"model: on {device}; ART runs on the CPU and on CUDA devices, move the model to one")
        module: nn.Module = planted.module
        if classes != 2:
            module = PaddedClasses(module, classes=classes)
        if probabilities:
            module = nn.Sequential(module, nn.Softmax(1))
        self.planted_problems = planted
        self.probabilities = probabilities
        super().__init__(
            model=module.eval(),
            loss=nn.CrossEntropyLoss(),
            optimizer=None,
            input_shape=tuple(planted.inputs.shape[1:]),
            nb_classes=classes,
            clip_values=planted.settings.threat_model.bounds,
            device_type="gpu" if device.type == "cuda" else "cpu",
        )

    @classmethod
    def from_classifier(
        cls,
        classifier: Any,
        x: np.ndarray[Any, Any],
        *,
        eps: float,
        norm: float | str = np.inf,
        classes: int = 2,
        probabilities: bool = False,
        layer: str | None = None,
        **settings: Any,
    ) -> BinarizedPyTorchClassifier:
        """Plant an adversarial example for each input of an ART classifier.

        Args:
            classifier: A ``PyTorchClassifier`` with ``clip_values``; its preprocessing is kept.
            x: Clean inputs, float ``(N, ...)`` within the clip values.
            eps: Budget in the units of ``x``.
            norm: ``np.inf``, ``"inf"``, 2 or 1.
            classes: See the class.
            probabilities: See the class.
            layer: Name of the linear layer that makes the logits; found when left out.
            **settings: Of the test, see :class:`robust_ext.evaluations.binarization.BinarizationSettings`.

        Raises:
            InvalidArgumentError: An argument is outside what is accepted.
            ModelError: The classifier cannot be split, or nothing could be planted in it.
        """
        if not isinstance(classifier, PyTorchClassifier):
            raise InvalidArgumentError("classifier", type(classifier).__name__, "an ART PyTorchClassifier")
        if classifier.clip_values is None:
            raise InvalidArgumentError(
                "classifier", "no clip_values", "a PyTorchClassifier made with clip_values=(lowest, highest)"
            )
        if norm not in _NORMS:
            raise InvalidArgumentError("norm", norm, "np.inf, 'inf', 2 or 1")
        ends = [np.unique(np.asarray(end, dtype=np.float64)) for end in classifier.clip_values]
        if any(len(values) != 1 for values in ends):
            raise InvalidArgumentError(
                "classifier", "clip_values that differ from value to value", "one pair of clip_values for all values"
            )
        threat_model = ThreatModel(norm=_NORMS[norm], epsilon=eps, bounds=(float(ends[0][0]), float(ends[1][0])))
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
        planted = plant(classifier, inputs, threat_model, layer=layer, **settings)
        return cls(planted, classes=classes, probabilities=probabilities)

    @property
    def x(self) -> np.ndarray[Any, Any]:
        """Where attacks begin, float32 ``(M, ...)``: those of the given inputs that could be planted."""
        inputs: np.ndarray[Any, Any] = self.planted_problems.inputs.cpu().numpy().copy()
        return inputs

    @property
    def y(self) -> np.ndarray[Any, Any]:
        """Their labels, all class 0, one-hot float32 ``(M, classes)``."""
        labels = np.zeros((len(self.planted_problems), self.nb_classes), dtype=np.float32)
        labels[:, 0] = 1
        return labels

    @property
    def samples(self) -> tuple[int, ...]:
        """Which of the given inputs :attr:`x` holds."""
        return self.planted_problems.samples

    def single(self, row: int) -> BinarizedPyTorchClassifier:
        """Problem ``row`` alone: a classifier that may be asked about any points."""
        planted = self.planted_problems.single(row)
        return type(self)(planted, classes=self.nb_classes, probabilities=self.probabilities)

    def verify(self, x_adv: np.ndarray[Any, Any]) -> Verification:
        """Check what an attack returned, ``(M, ...)``: finite, in bounds, within eps, and of another class."""
        candidates = torch.from_numpy(np.ascontiguousarray(x_adv))
        return self.planted_problems.verify(candidates.to(self.planted_problems.inputs.device))

    def score(self, x_adv: np.ndarray[Any, Any]) -> float:
        """The test score: share of the problems that verified candidates ``(M, ...)`` solve."""
        return self.verify(x_adv).outcomes.count("found") / len(self.planted_problems)
