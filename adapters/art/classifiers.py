"""ART classifiers as attacks of this project meet them: a module, bounds, inputs and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.model import adapt_model, bounds_of
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.validation import check_inputs, check_labels

PyTorchClassifier: Any = art.estimators.classification.PyTorchClassifier
# Inputs may be as far outside the clip values as rounding takes them, and are clipped.
_ROUNDING = 1e-5


class Predictions(nn.Module):
    """``predict`` of any classifier of ART, from arrays ``(N, ...)`` to ``(N, K)``, as a module without gradients."""

    def __init__(self, classifier: Any, *, batch_size: int) -> None:
        super().__init__()
        self._classifier = (classifier,)
        self.batch_size = batch_size
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Predictions ``(N, K)``, float32: logits, probabilities or one-hot labels."""
        predicted = self._classifier[0].predict(x.detach().cpu().numpy(), batch_size=self.batch_size)
        return torch.from_numpy(np.asarray(predicted, dtype=np.float32)).to(x.device)


def module_of(estimator: Any, *, gradients: bool, batch_size: int) -> tuple[nn.Module, tuple[float, float]]:
    """A ``PyTorchClassifier`` in eval mode, or any classifier where no gradients are needed, as a module and bounds.

    InvalidArgumentError where it has no clip values; ModelError where gradients are needed and it has preprocessing
    outside PyTorch or postprocessing, or where its bounds differ from value to value.
    """
    if estimator.clip_values is None:
        expected = "a pair (lowest, highest): candidates have to stay in bounds"
        raise InvalidArgumentError("estimator", "clip_values=None", expected)
    bounds = bounds_of(estimator.clip_values)
    if isinstance(estimator, PyTorchClassifier):
        try:
            return adapt_model(estimator).module, bounds
        except ModelError:
            if gradients:
                raise
    return Predictions(estimator, batch_size=batch_size), bounds


def device_of(estimator: Any) -> torch.device:
    """Where a classifier takes tensors."""
    return estimator.device if isinstance(estimator, PyTorchClassifier) else torch.device("cpu")


def clipped_inputs(x: Any, bounds: tuple[float, float]) -> Tensor:
    """Inputs ``(N, ...)`` as float32 on the CPU; rounding outside the bounds is clipped, more is refused."""
    inputs = torch.from_numpy(np.array(x, dtype=np.float32))
    near = inputs.clamp(*bounds)
    rounding = (inputs - near).abs() <= _ROUNDING * max(1.0, *map(abs, bounds))
    return check_inputs("x", torch.where(rounding, near, inputs), bounds=bounds)


def class_labels(estimator: Any, inputs: Tensor, y: Any, *, classes: int, batch_size: int) -> Tensor:
    """Labels as int64 ``(N,)``, of predictions where ``y`` is None, which is otherwise ``(N,)``, ``(N, 1)`` or one-hot.

    One-hot labels have ``classes`` columns or all those of the estimator; InvalidArgumentError where they do not fit.
    """
    if y is None:
        y = estimator.predict(inputs.numpy(), batch_size=batch_size)[:, :classes]
    y = np.asarray(y)
    hot = y.ndim == 2 and y.shape[1] in (classes, estimator.nb_classes)
    if not hot and y.shape not in (y.shape[:1], (*y.shape[:1], 1)):
        expected = f"one-hot labels ({len(inputs)}, {classes}) or indices ({len(inputs)},)"
        raise InvalidArgumentError("y", f"shape {y.shape}", expected)
    indices = y.argmax(1) if hot else y.reshape(-1)
    return check_labels("y", torch.from_numpy(indices.astype(np.int64)), samples=len(inputs), classes=classes)
