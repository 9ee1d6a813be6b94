"""ART classifiers as modules, checks of classifiers that users pass, and targets as ART meets them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.art.library import art
from robust_ext.adapters.bridge import Standardised, bridged, noted
from robust_ext.adapters.keras import keras_model
from robust_ext.adapters.sklearn import estimator_model
from robust_ext.adapters.tensorflow import TensorFlowFunction
from robust_ext.core.errors import AttackError, InvalidArgumentError, ModelError, warn
from robust_ext.core.foreign import foreign_code
from robust_ext.core.target import Target
from robust_ext.core.validation import check_inputs, check_labels
from robust_ext.models.black_box import BlackBox
from robust_ext.registry.base import AdaptedModel, comes_from

_CLASSIFIERS: Any = art.estimators.classification
PyTorchClassifier: Any = _CLASSIFIERS.PyTorchClassifier
DIFFERENTIABLE: tuple[Any, ...] = (
    PyTorchClassifier,
    _CLASSIFIERS.TensorFlowV2Classifier,
    _CLASSIFIERS.KerasClassifier,
)
"""The classifiers that gradients come back through."""
_standardisation: Any = importlib.import_module("art.preprocessing.standardisation_mean_std")
_STANDARDISATIONS = (_standardisation.StandardisationMeanStd, _standardisation.StandardisationMeanStdTensorFlow)
_broadcastable: Any = importlib.import_module("art.preprocessing.standardisation_mean_std.utils").broadcastable_mean_std


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
    """Turn an ART classifier of PyTorch, TensorFlow or Keras into a module and its bounds, others into a black box.

    ModelError where it has preprocessing without gradients or postprocessing, or its bounds differ from value to value.
    """
    if not isinstance(model, DIFFERENTIABLE):
        return _of_black_box(model)
    steps, of_torch = model.preprocessing_operations, isinstance(model, PyTorchClassifier)
    within = art.defences.preprocessor.preprocessor.PreprocessorPyTorch if of_torch else _STANDARDISATIONS
    outside = [type(step).__name__ for step in steps if not isinstance(step, within)]
    if outside:
        raise ModelError(
            f"model: its preprocessing {', '.join(outside)} runs in numpy, where no gradient flows; use ART's PyTorch "
            "variant of it, or put it into an nn.Module with an approximate gradient"
            if of_torch
            else f"model: its preprocessing {', '.join(outside)} is not among what is kept of a classifier of another "
            "framework than PyTorch, which is standardisation; put it into the model"
        )
    if model.postprocessing_defences:
        names = ", ".join(type(step).__name__ for step in model.postprocessing_defences)
        raise ModelError(
            f"model: its postprocessing {names} changes the logits in numpy; remove it, or put it into the module"
        )
    bounds = None if model.clip_values is None else bounds_of(model.clip_values)
    return AdaptedModel(module=ArtModule(model) if of_torch else _of_keras(model), bounds=bounds)


def _of_black_box(classifier: Any) -> AdaptedModel:
    """Return any other classifier of ART as a black box: its ``predict``, or that of the estimator inside."""
    if not isinstance(classifier, art.estimators.classification.classifier.ClassifierMixin):
        raise InvalidArgumentError(
            "model", f"art's {type(classifier).__name__}", "an ART classifier, as PyTorchClassifier"
        )
    if classifier.clip_values is None:
        expected = "a pair (lowest, highest), which a model without gradients cannot do without"
        raise InvalidArgumentError("model", "clip_values=None", expected)
    bounds, inside = bounds_of(classifier.clip_values), getattr(classifier, "model", None)
    changed = [*classifier.preprocessing_operations, *(classifier.postprocessing_defences or ())]
    plain = all(np.all(getattr(one, "mean", 1) == 0) and np.all(getattr(one, "std", 0) == 1) for one in changed)
    if plain and hasattr(inside, "predict"):
        return AdaptedModel(module=estimator_model(inside), bounds=bounds)
    shape = classifier.input_shape
    few = np.random.default_rng(0).uniform(*bounds, size=(8, *shape)).astype(np.float32)
    predict = _Predict(classifier)
    with foreign_code("model", f"{type(classifier).__name__}.predict", hint="it is asked for 8 random inputs"):
        found = np.asarray(predict(few))
    sums = found.sum(1) if found.ndim == 2 else np.zeros(1)
    likely = bool(found.min() >= 0 and found.max() <= 1 and np.abs(sums - 1).max() < 1e-3)
    returns = "logits" if not likely else "labels" if bool(np.isin(found, (0, 1)).all()) else "probabilities"
    warn(
        f"model: the outputs of art's {type(classifier).__name__} for 8 random inputs look like {returns}, and are "
        "taken for these; robust_ext.black_box(classifier.predict, returns=...) states what they are"
    )
    return AdaptedModel(module=BlackBox(predict, returns=returns, classes=classifier.nb_classes), bounds=bounds)


class _Predict:
    """The ``predict`` of a classifier."""

    def __init__(self, classifier: Any) -> None:
        self.classifier = classifier

    def __call__(self, x: Any) -> Any:
        return self.classifier.predict(x)


def _of_keras(classifier: Any) -> nn.Module:
    """Return a Keras model, or another callable of TensorFlow, behind the classifier's standardisation."""
    before: list[nn.Module] = []
    example = np.zeros((1, *classifier.input_shape))
    for step in classifier.preprocessing_operations:
        mean, std = _broadcastable(example, step.mean, step.std)
        if step.apply_predict and not (np.all(mean == 0) and np.all(std == 1)):
            before.append(Standardised(mean, std))
    kept = nn.Sequential(*before).eval() if before else None
    if comes_from(classifier.model, "keras"):
        module = keras_model(classifier.model, before=kept)
    else:
        module = bridged(TensorFlowFunction(classifier.model), before=kept)
    return noted(module, channels_last=not classifier.channels_first, library="art")


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


def bounds_of(clip_values: Any) -> tuple[float, float]:
    """Clip values as one pair (lowest, highest); ModelError where they differ from value to value."""
    ends = [np.unique(np.asarray(end, dtype=np.float64)) for end in clip_values]
    if any(len(values) != 1 for values in ends):
        raise ModelError(
            "model: its clip_values differ from value to value, and a threat model has one pair of bounds; scale the "
            "inputs to common bounds and move the scaling into the preprocessing"
        )
    return float(ends[0][0]), float(ends[1][0])


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
    """Return a classifier with gradients, or without gradients any classifier, as a module in eval mode and its bounds.

    InvalidArgumentError where it has no clip values; ModelError where gradients are needed and it has preprocessing
    without them or postprocessing, or where its bounds differ from value to value.
    """
    if estimator.clip_values is None:
        expected = "a pair (lowest, highest): candidates have to stay in bounds"
        raise InvalidArgumentError("estimator", "clip_values=None", expected)
    bounds = bounds_of(estimator.clip_values)
    if isinstance(estimator, DIFFERENTIABLE):
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


class HostModule(nn.Module):
    """The target's module as ART meets it.

    ART probes a model with a row of ones while it constructs some attacks, to see whether it returns probabilities.
    Until ``constructed`` is set such a probe returns zeros, which are none, without a query of the target: a probe is
    no query of the attack, and a target may accept nothing but the samples of its batch. On numpy 2 some of ART's
    attacks send float64, so inputs are cast. With ``probabilities`` it returns the softmax of the logits; with
    ``channels_last`` it takes images (height, width, channels).
    """

    def __init__(self, target: Target, *, probabilities: bool = False, channels_last: bool = False) -> None:
        super().__init__()
        self.module = target.module
        self.classes = target.classes
        self.probabilities = probabilities
        self.channels_last = channels_last
        self.constructed = False
        # Attacks on features are given this layer: what ART hooks into is not a part of the target.
        self.logits = nn.Identity()
        # Some attacks read their device from the parameters, and a target may have none.
        self.register_parameter("_device", nn.Parameter(torch.zeros((), device=target.device), requires_grad=False))
        self.training = target.module.training

    def forward(self, x: Tensor) -> Tensor:
        """Return logits or probabilities ``(N, K)`` of inputs of any floating-point type."""
        if not self.constructed:
            return x.new_zeros(len(x), self.classes)
        x = x.to(torch.float32)
        logits: Tensor = self.logits(self.module(x.movedim(-1, 1) if self.channels_last else x))
        return logits.softmax(1) if self.probabilities else logits


def make_estimator(module: HostModule, target: Target) -> Any:
    """Make a ``PyTorchClassifier`` of the module; AttackError where ART does not run on the target's device."""
    if target.device.type not in ("cpu", "cuda"):
        raise AttackError(
            f"ART runs on the CPU and on CUDA devices, and the target is on {target.device}; move the model"
        )
    shape = target.input_shape
    return PyTorchClassifier(
        model=module,
        loss=nn.CrossEntropyLoss(),
        optimizer=None,
        input_shape=(*shape[1:], shape[0]) if module.channels_last else shape,
        nb_classes=target.classes,
        channels_first=not module.channels_last,
        clip_values=target.bounds,
        device_type="gpu" if target.device.type == "cuda" else "cpu",
    )


@contextmanager
def without_new_hooks(module: nn.Module) -> Iterator[None]:
    """Take away the forward hooks that were added inside: ART leaves one behind for each look at a layer."""
    before = [(part, dict(part._forward_hooks)) for part in module.modules()]
    try:
        yield
    finally:
        for part, hooks in before:
            part._forward_hooks.clear()
            part._forward_hooks.update(hooks)
