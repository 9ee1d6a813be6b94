"""A classifier with a detector as an ART classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from robust_ext.adapters.libraries import load_art
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.models.defended import Defended
from robust_ext.registry.detector import as_detector
from robust_ext.registry.model import as_module

PyTorchClassifier: Any = load_art().estimators.classification.PyTorchClassifier


class DefendedPyTorchClassifier(PyTorchClassifier):  # type: ignore[misc]
    """A ``PyTorchClassifier`` whose inputs a detector may reject.

    All behaviour lies in its module, a :class:`robust_ext.models.defended.Defended`, so it survives the attacks that
    make a classifier of their own around ``estimator.model``. With ``view="reject"`` there is one class more, the last,
    which wins exactly where an input is rejected. An untargeted attack takes that for a success: aim attacks at a
    class, and count with :meth:`outcomes`, which does not.

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
    def from_classifier(cls, classifier: Any, detector: object, *, view: str = "reject") -> DefendedPyTorchClassifier:
        """Put a detector beside an ART classifier.

        Args:
            classifier: A ``PyTorchClassifier`` with ``clip_values``; its preprocessing is kept.
            detector: With a threshold: a detector of this project that watches the classifier's network, or anything
                else that :func:`robust_ext.as_detector` takes.
            view: ``"reject"`` or ``"classifier"``.

        Raises:
            InvalidArgumentError: An argument is of another kind.
        """
        if not isinstance(classifier, PyTorchClassifier):
            raise InvalidArgumentError("classifier", type(classifier).__name__, "an ART PyTorchClassifier")
        if classifier.clip_values is None:
            raise InvalidArgumentError(
                "classifier", "no clip_values", "a PyTorchClassifier made with clip_values=(lowest, highest)"
            )
        module = as_module(classifier).module
        low, high = (float(np.asarray(end).reshape(-1)[0]) for end in classifier.clip_values)
        probe = torch.full((2, *classifier.input_shape), (low + high) / 2)
        return cls(
            Defended(module, as_detector(detector, module, inputs=probe), exposure=view),
            input_shape=classifier.input_shape,
            nb_classes=classifier.nb_classes,
            clip_values=(low, high),
        )

    def rejects(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which inputs ``(N, ...)`` are rejected, bool ``(N,)``."""
        rejected: np.ndarray[Any, Any] = self.defended.decide(self._tensor(x))[1].cpu().numpy()
        return rejected

    def outcomes(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> list[str]:
        """What becomes of inputs: ``"correct"``, ``"rejected"``, or ``"fooled"`` (wrong and let pass).

        Args:
            x: ``(N, ...)``.
            y: True classes, indices ``(N,)`` or one-hot.
        """
        labels = np.asarray(y)
        labels = labels.argmax(1) if labels.ndim > 1 else labels
        predicted, rejected = (part.cpu().numpy() for part in self.defended.decide(self._tensor(x)))
        return [
            "rejected" if out else "correct" if right else "fooled"
            for out, right in zip(rejected, predicted == labels, strict=True)
        ]

    def _tensor(self, x: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(self.device)
