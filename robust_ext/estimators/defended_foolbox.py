"""A classifier with a detector as a Foolbox model, and what counts as fooling it as a Foolbox criterion."""

from __future__ import annotations

from typing import Any

import eagerpy
import torch

from robust_ext.adapters.libraries import load_foolbox
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.models.defended import Defended
from robust_ext.registry.detector import as_detector
from robust_ext.registry.model import as_module

foolbox = load_foolbox()
PyTorchModel: Any = foolbox.PyTorchModel
Misclassification: Any = foolbox.criteria.Misclassification


class DefendedPyTorchModel(PyTorchModel):  # type: ignore[misc]
    """A Foolbox ``PyTorchModel`` whose inputs a detector may reject.

    With ``view="reject"`` its logits have one column more, the last, which wins exactly where an input is rejected.
    Attack it with :class:`Undetected` as criterion: the mere labels would count being rejected as a success.

    Args:
        defended: The module.
        bounds: Lowest and highest input value.
    """

    def __init__(self, defended: Defended, *, bounds: tuple[float, float]) -> None:
        if not isinstance(defended, Defended):
            raise InvalidArgumentError("defended", type(defended).__name__, "a robust_ext.models.defended.Defended")
        self.defended = defended
        super().__init__(defended, bounds=bounds, device=defended.detector.threshold.device)

    @classmethod
    def from_model(cls, model: Any, detector: object, *, inputs: Any, view: str = "reject") -> DefendedPyTorchModel:
        """Put a detector beside a Foolbox model.

        Args:
            model: A Foolbox ``PyTorchModel``, wrapped or not; its preprocessing and bounds are kept.
            detector: With a threshold, see :func:`robust_ext.as_detector`.
            inputs: A few inputs ``(n, ...)``, to see that the detector watches this model.
            view: ``"reject"`` or ``"classifier"``.

        Raises:
            InvalidArgumentError: An argument is of another kind.
        """
        if not isinstance(model, foolbox.models.Model):
            raise InvalidArgumentError("model", type(model).__name__, "a Foolbox PyTorchModel")
        adapted = as_module(model)
        some = torch.as_tensor(getattr(inputs, "raw", inputs))[:4]
        defended = Defended(adapted.module, as_detector(detector, adapted.module, inputs=some), exposure=view)
        low, high = (float(end) for end in model.bounds)
        return cls(defended, bounds=(low, high))


class Undetected(Misclassification):  # type: ignore[misc]
    """Misclassified and not rejected: what fools a classifier with a detector.

    For models whose last logit is that of being rejected (``DefendedPyTorchModel`` with ``view="reject"``). Attacks
    ask it at the end, and many that minimise a norm while they search.

    Args:
        labels: True classes ``(N,)``.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.labels!r})"

    def __call__(self, perturbed: Any, outputs: Any) -> Any:
        """Which inputs fool the model, bool ``(N,)``, of the type of ``outputs`` ``(N, K + 1)``."""
        outputs_, restore_type = eagerpy.astensor_(outputs)
        classes = outputs_.argmax(axis=-1)
        fooled = eagerpy.logical_and(classes != self.labels, classes != outputs_.shape[-1] - 1)
        return restore_type(fooled)
