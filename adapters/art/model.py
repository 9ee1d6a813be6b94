"""ART classifiers as modules, and checks of classifiers that users pass."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.art.library import art
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.validation import check_inputs, check_labels
from robust_ext.registry.base import AdaptedModel


class ArtModule(nn.Module):
    """An ART PyTorch classifier as a module: preprocessing in PyTorch, then its network, all with gradients.

    A network in train mode, as a fitted classifier has until it first predicts, is copied into eval mode, in which ART
    predicts: the classifier stays as it was, and is measured as it predicts.
    """

    library = "art"

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.network: nn.Module = _in_eval_mode(classifier.model)
        self._steps = tuple(classifier.preprocessing_operations)
        self.training = self.network.training

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, K)`` of inputs ``(N, ...)`` within the classifier's clip values."""
        for step in self._steps:
            if step.apply_predict:
                x, _ = step.forward(x, None)
        out: Tensor = self.network(x)
        return out


def adapt_model(model: Any) -> AdaptedModel:
    """Turn an ART ``PyTorchClassifier`` into a module and its bounds.

    ModelError where it has preprocessing outside PyTorch or postprocessing, or its bounds differ from value to value.
    """
    if not isinstance(model, art.estimators.classification.PyTorchClassifier):
        raise InvalidArgumentError("model", f"art's {type(model).__name__}", "an art PyTorchClassifier")
    outside = [type(step).__name__ for step in model.preprocessing_operations if not _runs_in_torch(step)]
    if outside:
        raise ModelError(
            f"model: its preprocessing {', '.join(outside)} runs in numpy, where no gradient flows; use ART's PyTorch "
            "variant of it, or put it into an nn.Module with an approximate gradient"
        )
    if model.postprocessing_defences:
        names = ", ".join(type(step).__name__ for step in model.postprocessing_defences)
        raise ModelError(
            f"model: its postprocessing {names} changes the logits in numpy; remove it, or put it into the module"
        )
    bounds = None if model.clip_values is None else bounds_of(model.clip_values)
    return AdaptedModel(module=ArtModule(model), bounds=bounds)


def _in_eval_mode(network: nn.Module) -> nn.Module:
    if not any(part.training for part in network.modules()):
        return network
    try:
        return copy.deepcopy(network).eval()
    except Exception as error:
        # Copying runs the user's own code.
        raise ModelError(
            "model: its network is in train mode, as a new ART classifier is until it first predicts, and cannot be "
            f"copied ({type(error).__name__}: {error}); call classifier.model.eval() first"
        ) from error


def _runs_in_torch(step: object) -> bool:
    return isinstance(step, art.defences.preprocessor.preprocessor.PreprocessorPyTorch)


def bounds_of(clip_values: Any) -> tuple[float, float]:
    """Clip values as one pair (lowest, highest); ModelError where they differ from value to value."""
    ends = [np.unique(np.asarray(end, dtype=np.float64)) for end in clip_values]
    if any(len(values) != 1 for values in ends):
        raise ModelError(
            "model: its clip_values differ from value to value, and a threat model has one pair of bounds; scale the "
            "inputs to common bounds and move the scaling into the preprocessing"
        )
    return float(ends[0][0]), float(ends[1][0])


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
        """Return predictions ``(N, K)``, float32: logits, probabilities or one-hot labels."""
        predicted = self._classifier[0].predict(x.detach().cpu().numpy(), batch_size=self.batch_size)
        return torch.from_numpy(np.asarray(predicted, dtype=np.float32)).to(x.device)


def module_of(estimator: Any, *, gradients: bool, batch_size: int) -> tuple[nn.Module, tuple[float, float]]:
    """Return a ``PyTorchClassifier``, or without gradients any classifier, as a module in eval mode and its bounds.

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
    """Return the device of a classifier's tensors."""
    return estimator.device if isinstance(estimator, PyTorchClassifier) else torch.device("cpu")


def clipped_inputs(x: Any, bounds: tuple[float, float]) -> Tensor:
    """Return inputs ``(N, ...)`` as float32 on the CPU; clip what rounding put outside the bounds, refuse more."""
    inputs = torch.from_numpy(np.array(x, dtype=np.float32))
    near = inputs.clamp(*bounds)
    rounding = (inputs - near).abs() <= _ROUNDING * max(1.0, *map(abs, bounds))
    return check_inputs("x", torch.where(rounding, near, inputs), bounds=bounds)


def class_labels(estimator: Any, inputs: Tensor, y: Any, *, classes: int, batch_size: int) -> Tensor:
    """Return int64 labels ``(N,)`` of ``y``: ``(N,)``, ``(N, 1)`` or one-hot; None stands for the predictions.

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
