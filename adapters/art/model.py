"""ART classifiers as modules."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from torch import Tensor, nn

from robust_ext.adapters.art.library import art
from robust_ext.core.errors import InvalidArgumentError, ModelError
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
        """Logits ``(N, K)`` of inputs ``(N, ...)`` within the classifier's clip values."""
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
