"""Classifiers that end in one linear layer, split into features and readout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.classifier import check_classifier
from robust_ext.core.devices import tolerance_of
from robust_ext.core.errors import InvalidArgumentError, SplitError
from robust_ext.core.random import seeded_globals
from robust_ext.models.features.observed import LayerInput, layer_names

# Of the largest logit, in single precision; in coarser ones more.
TOLERANCE = 1e-4


def check_features(part: nn.Module, inputs: Tensor) -> Tensor:
    """Features of ``inputs`` ``(n, ...)``; SplitError where they are no tensor of n rows."""
    with torch.no_grad(), seeded_globals(0):
        features: Tensor = part(inputs)
    if not isinstance(features, Tensor):
        raise SplitError(f"features: got {type(features).__name__}, expected a tensor (n, F)")
    if features.dim() < 2 or features.shape[0] != inputs.shape[0]:
        raise SplitError(
            f"features: got shape {tuple(features.shape)} for {inputs.shape[0]} inputs, expected "
            f"({inputs.shape[0]}, F), or more dimensions for a readout that takes them"
        )
    return features


@dataclass(frozen=True)
class Split:
    """A classifier as features ``(N, *shape)`` and their readout; ``layer`` names it where layers have names.

    ``kind`` is how the logits follow from the features: ``"pair"`` (the user's two modules), ``"linear"`` (an
    ``nn.Linear`` of the model), ``"replayed"`` (the operations behind the features, run again), ``"beside"`` (the
    logits are features too, next to averages of a large map), ``"logits"`` (the logits are the features).
    """

    features: nn.Module
    readout: nn.Module
    layer: str = ""
    shape: tuple[int, ...] = ()
    kind: str = "linear"


class Part(nn.Module):
    """A callable part of a classifier, such as a method of a network, as a module in eval mode."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        owner = getattr(function, "__self__", None)
        # So that its weights count as this module's.
        self.owner = owner if isinstance(owner, nn.Module) else None
        self.function = function
        self.training = self.owner is not None and self.owner.training

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's output."""
        return self.function(x)


class LastPart(nn.Module):
    """A linear layer that reads the last of features that were concatenated, in its own precision."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.training = linear.training

    def forward(self, features: Tensor) -> Tensor:
        """The layer's outputs ``(N, K)`` of features ``(N, F)``."""
        found: Tensor = self.linear(features[:, -self.linear.in_features :].to(self.linear.weight.dtype))
        return found


class LastColumns(nn.Module):
    """The last ``columns`` of features: the logits, where they are features too."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.training = False

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(N, K)`` of features ``(N, F)``."""
        return features[:, -self.columns :]


def as_parts(model: object) -> tuple[nn.Module, nn.Module] | None:
    """A pair ``(features, readout)`` as modules, each of which may be any callable; None for what is no pair."""
    if not isinstance(model, (tuple, list)):
        return None
    if len(model) != 2 or not all(callable(part) for part in model):
        shown = ", ".join(type(part).__name__ for part in model)
        expected = "a pair (features, readout) of torch modules or callables"
        raise InvalidArgumentError("model", f"({shown})", expected)
    features, readout = (part if isinstance(part, nn.Module) else Part(part) for part in model)
    return features, readout


def split_linear(model: nn.Module, inputs: Tensor, *, layer: str | None = None, tolerance: float = TOLERANCE) -> Split:
    """Split a classifier whose logits are the outputs of an ``nn.Linear``, verified on ``inputs`` ``(n, ...)``.

    It is found where ``layer`` is left out; before its name, with commas, others may be given, whose inputs are
    features too. SplitError: there is none, or something follows it.
    """
    # A random model draws the same each time.
    with seeded_globals(0):
        logits = check_classifier(model, inputs)
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    if layer is None:
        layer = _last_linear(model, linear, inputs, logits, tolerance)
    layers = layer_names(layer)
    if layers[-1] not in linear:
        known, last = ", ".join(list(linear)[-5:]) or "none", "" if len(layers) == 1 else " as the last one"
        raise SplitError(
            f"layer: got {layer!r}, expected the name of an nn.Linear of the model{last} (the last ones: {known})"
        )
    parts, last_linear = dict(model.named_modules()), linear[layers[-1]]
    for name in layers[:-1]:
        if name not in parts:
            raise SplitError(f"layer: got {name!r}, expected the name of a module of the model, see named_modules()")
    single = last_linear.weight.dtype in (torch.float32, torch.float64)
    readout = last_linear if len(layers) == 1 and single else LastPart(last_linear)
    seen = LayerInput(model, ",".join(layers))
    features = check_features(seen, inputs)
    if len(layers) == 1 and features.shape[1] != last_linear.in_features:
        raise SplitError(
            f"layer {layer!r}: reads features at several positions, of which the logits are made afterwards"
        )
    result = Split(seen, readout, ",".join(layers), tuple(features.shape[1:]))
    with torch.no_grad():
        output: Tensor = result.readout(features)
    if output.shape != logits.shape:
        raise SplitError(
            f"layer {layer!r}: got outputs of shape {tuple(output.shape)}, expected the model's logits of shape "
            f"{tuple(logits.shape)}; name the last linear layer"
        )
    difference = float((output - logits).abs().max())
    limit = tolerance_of(model, output, logits, single=tolerance) * (1 + float(logits.abs().max()))
    if difference > limit or not _makes_logits(model, last_linear, inputs, logits):
        raise SplitError(
            f"layer {layer!r}: the logits differ from the model's by up to {difference:.3g}, so something follows that "
            "layer; fold it into the layer's weights, or give a pair (features, readout)"
        )
    return result


def _last_linear(
    model: nn.Module, linear: dict[str, nn.Linear], inputs: Tensor, logits: Tensor, tolerance: float
) -> str:
    """Name of the linear layer whose output is the model's."""
    outputs: list[tuple[str, Tensor]] = []
    with ExitStack() as stack, torch.no_grad(), seeded_globals(0):
        for name, part in linear.items():
            hook = part.register_forward_hook(lambda *call, name=name: outputs.append((name, call[2].detach())))
            stack.enter_context(hook)
        model(inputs)
    if not outputs:
        raise SplitError(
            "model: no nn.Linear takes part in a forward pass, so there is no linear readout to replace; give a pair "
            "(features, readout)"
        )
    for name, output in reversed(outputs):
        if output.shape == logits.shape and float((output - logits).abs().max()) <= tolerance_of(
            model, output, single=tolerance
        ) * (1 + float(logits.abs().max())):
            return name
    raise SplitError(
        f"model: the last linear layer {outputs[-1][0]!r} does not produce the logits (something follows it); name the "
        "layer, fold what follows into its weights, or give a pair (features, readout)"
    )


def _makes_logits(model: nn.Module, linear: nn.Linear, inputs: Tensor, logits: Tensor) -> bool:
    """Return whether a model returns what its linear layer does, also where that is something else, and large.

    With few inputs and random weights, logits hardly vary: a log-softmax or the average with another head would pass.
    """
    signs = 1 - 2 * (torch.arange(logits.numel(), device=logits.device).view_as(logits) * 7 % 3 % 2)
    put = (10 * (1 + logits.abs().max()) * signs).to(logits.dtype)

    def replace(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return put.to(output.dtype).view_as(output)

    with torch.no_grad(), seeded_globals(0), linear.register_forward_hook(replace):
        out: Tensor = model(inputs)
    return out.shape == put.shape and torch.allclose(
        out.to(put), put, rtol=tolerance_of(model, logits, single=TOLERANCE)
    )
