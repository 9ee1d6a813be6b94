"""Binarized classifiers and classifiers with a detector as ART classifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from robust_ext.adapters.art.model import PyTorchClassifier, bounds_of
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.threat import ThreatModel, norm_name
from robust_ext.models.defended import Defended
from robust_ext.models.wrapping import PaddedClasses
from robust_ext.registry.detector import as_detector
from robust_ext.registry.model import as_module

if TYPE_CHECKING:
    from robust_ext.engine.verify import Verification
    from robust_ext.evaluations.binarization import Planted


class BinarizedPyTorchClassifier(PyTorchClassifier):  # type: ignore[misc]
    """A ``PyTorchClassifier`` with adversarial examples planted in it, for any ART attack.

    Start attacks at :attr:`x` with labels :attr:`y`, and hand what they return to :meth:`score`. Attacks that query
    some of the rows far from their inputs (BoundaryAttack, HopSkipJump and others without gradients) are refused with a
    ModelError, and are to be run on one problem at a time: see :meth:`single`. Those that query all rows far from them
    are to be given a ``batch_size`` of at least that many. ``robust_ext.binarization_test`` does all that by itself.

    Args:
        planted: The problems.
        classes: Classes of the classifier: more than two are padding that never wins, for attacks that compare three.
        probabilities: Return the softmax of the logits, for the attacks that need one (NewtonFool, SimBA,
            VirtualAdversarialMethod).

    Source: Zimmermann et al., "Increasing Confidence in Adversarial Robustness Evaluations" (2022), algorithm 1.
    """

    def __init__(self, planted: Planted, *, classes: int = 2, probabilities: bool = False) -> None:
        device, module = planted.inputs.device, cast(nn.Module, planted.module)
        if device.type not in ("cpu", "cuda"):
            raise ModelError(f"model: on {device}; ART runs on the CPU and on CUDA devices, move the model to one")
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
            norm: ``np.inf``, 2 or 1, or ``"linf"``, ``"l2"`` or ``"l1"``.
            classes: See the class, as for ``probabilities``.
            probabilities: Whether to return probabilities.
            layer: Name of the linear layer that makes the logits; found when left out.
            **settings: Of the test, see :class:`robust_ext.evaluations.binarization.BinarizationSettings`.

        Raises:
            InvalidArgumentError: An argument is outside its range.
            ModelError: The classifier cannot be split, or nothing could be planted in it.
        """
        # The public face: adapters lie below the evaluations, and planting is one of them.
        from robust_ext import plant

        threat_model = ThreatModel(norm=norm_name(norm), epsilon=eps, bounds=_checked_bounds(classifier))
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
        planted = plant(classifier, inputs, threat_model, layer=layer, **settings)
        return cls(planted, classes=classes, probabilities=probabilities)

    @property
    def x(self) -> np.ndarray[Any, Any]:
        """The inputs with planted points, float32 ``(M, ...)``."""
        return self.planted_problems.inputs.cpu().numpy().copy()

    @property
    def y(self) -> np.ndarray[Any, Any]:
        """Their labels, all class 0, one-hot float32 ``(M, classes)``."""
        labels = np.zeros((len(self.planted_problems), self.nb_classes), dtype=np.float32)
        labels[:, 0] = 1
        return labels

    @property
    def samples(self) -> tuple[int, ...]:
        """The indices of :attr:`x` among the given inputs."""
        return self.planted_problems.samples

    def predict(
        self, x: np.ndarray[Any, Any], batch_size: int = 128, training_mode: bool = False, **kwargs: Any
    ) -> np.ndarray[Any, Any]:
        """Return logits, or probabilities, ``(n, classes)``; never divide a batch of all rows."""
        size = max(batch_size, len(x)) if len(x) == len(self.planted_problems) else batch_size
        predict: Any = super().predict
        logits: np.ndarray[Any, Any]
        try:
            logits = predict(x, batch_size=size, training_mode=training_mode, **kwargs)
        except ModelError:
            # Some attacks look at the prediction of one image of ones, to see whether it is of probabilities.
            if len(x) != 1 or not np.all(x == 1):
                raise
            logits = predict(self.x[:1], training_mode=training_mode, **kwargs)
        return logits

    def set_params(self, **kwargs: Any) -> None:
        """Set parameters of the estimator; InvalidArgumentError for ``clip_values`` other than the problems' bounds."""
        bounds = self.planted_problems.settings.threat_model.bounds
        wanted = kwargs.get("clip_values", bounds)
        if wanted is None or list(bounds_of(wanted)) != np.asarray(bounds, dtype=np.float32).tolist():
            expected = (
                f"{bounds}, the bounds in which the problems were planted; for others make another classifier, "
                f"{type(self).__name__}(classifier.planted_problems.transform_bounds((lowest, highest)))"
            )
            raise InvalidArgumentError("clip_values", wanted, expected)
        super().set_params(**kwargs)

    def single(self, row: int) -> BinarizedPyTorchClassifier:
        """Return problem ``row`` alone: a classifier that may be queried at any points."""
        return type(self)(self.planted_problems.single(row), classes=self.nb_classes, probabilities=self.probabilities)

    def verify(self, x_adv: np.ndarray[Any, Any]) -> Verification:
        """Check what an attack returned, ``(M, ...)``: finite, in bounds, within eps, and of another class."""
        candidates = torch.from_numpy(np.ascontiguousarray(x_adv))
        return self.planted_problems.verify(candidates.to(self.planted_problems.inputs.device))

    def score(self, x_adv: np.ndarray[Any, Any]) -> float:
        """Return the test score: the share of problems that verified candidates ``(M, ...)`` solve."""
        return self.verify(x_adv).outcomes.count("found") / len(self.planted_problems)


class DefendedPyTorchClassifier(PyTorchClassifier):  # type: ignore[misc]
    """A ``PyTorchClassifier`` whose inputs a detector may reject.

    With ``exposure="reject"`` there is one class more, the last, which wins exactly where an input is rejected. An
    untargeted attack takes that for a success: aim attacks at a class, and count with :meth:`outcomes`, which does not.

    Args:
        defended: The module.
        input_shape: Shape of one input.
        nb_classes: Classes of the classifier, without that of being rejected.
        clip_values: Lowest and highest input value.
        loss: As ART takes it; cross-entropy when left out.
    """

    def __init__(
        self,
        defended: Defended,
        *,
        input_shape: tuple[int, ...],
        nb_classes: int,
        clip_values: tuple[float, float],
        loss: nn.Module | None = None,
    ) -> None:
        if not isinstance(defended, Defended):
            raise InvalidArgumentError("defended", type(defended).__name__, "a robust_ext.models.defended.Defended")
        self.defended = defended
        super().__init__(
            model=defended,
            loss=nn.CrossEntropyLoss() if loss is None else loss,
            optimizer=None,
            input_shape=input_shape,
            nb_classes=nb_classes + (defended.exposure == "reject"),
            clip_values=clip_values,
            device_type="gpu" if defended.detector.threshold.is_cuda else "cpu",
        )

    @classmethod
    def from_classifier(
        cls, classifier: Any, detector: object, *, exposure: str = "reject"
    ) -> DefendedPyTorchClassifier:
        """Put a detector next to an ART classifier.

        Args:
            classifier: A ``PyTorchClassifier`` with ``clip_values``; its preprocessing is kept.
            detector: With a threshold: a detector of this project that watches the classifier's network, or anything
                else that :func:`robust_ext.as_detector` takes.
            exposure: ``"reject"`` or ``"classifier"``.

        Raises:
            InvalidArgumentError: An argument is of another kind.
        """
        low, high = _checked_bounds(classifier)
        module = as_module(classifier).module
        probe = torch.full((2, *classifier.input_shape), (low + high) / 2)
        return cls(
            Defended(module, as_detector(detector, module, inputs=probe), exposure=exposure),
            input_shape=classifier.input_shape,
            nb_classes=classifier.nb_classes,
            clip_values=(low, high),
        )

    def rejects(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a mask of rejected inputs ``(N, ...)``, bool ``(N,)``."""
        return self.defended.decide(self._tensor(x))[1].cpu().numpy()

    def outcomes(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> list[str]:
        """Return the outcomes of inputs: ``"correct"``, ``"rejected"``, or ``"fooled"`` (wrong and accepted).

        Args:
            x: ``(N, ...)``.
            y: True classes, indices ``(N,)`` or one-hot.
        """
        labels = np.asarray(y)
        labels = labels.argmax(1) if labels.ndim > 1 else labels
        predicted, rejected = (part.cpu().numpy() for part in self.defended.decide(self._tensor(x)))
        found: list[str] = np.where(rejected, "rejected", np.where(predicted == labels, "correct", "fooled")).tolist()
        return found

    def _tensor(self, x: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(self.device)


def _checked_bounds(classifier: Any) -> tuple[float, float]:
    """Return the one pair of clip values of an ART classifier; InvalidArgumentError where there is none."""
    if not isinstance(classifier, PyTorchClassifier):
        raise InvalidArgumentError("classifier", type(classifier).__name__, "an ART PyTorchClassifier")
    if classifier.clip_values is None:
        expected = "a PyTorchClassifier made with clip_values=(lowest, highest)"
        raise InvalidArgumentError("classifier", "no clip_values", expected)
    try:
        return bounds_of(classifier.clip_values)
    except ModelError as error:
        got = "clip_values that differ from value to value"
        raise InvalidArgumentError("classifier", got, "one pair of clip_values for all values") from error
