"""Features and readout: a classifier as ``readout o features``, found by itself, named, or given as a pair.

Ordinary networks end in one linear layer. It is found by watching which ``nn.Linear`` produces the logits in one
forward pass, so functional code, skips and wrapped models work without tracing; the result is verified.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import InvalidArgumentError, SplitError
from robust_ext.core.precision import tolerance_of
from robust_ext.core.random import seeded_globals
from robust_ext.models.precision import InPrecision, weights_type


@dataclass(frozen=True)
class Split:
    """A classifier as features ``(N, *shape)`` and their readout; ``layer`` names it, empty for a user's pair."""

    features: nn.Module
    readout: nn.Module
    layer: str = ""
    shape: tuple[int, ...] = ()


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
        """What the function returns."""
        return self.function(x)


class LastPart(nn.Module):
    """A linear layer that reads the last of features that were concatenated."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.training = linear.training

    def forward(self, features: Tensor) -> Tensor:
        """The layer's outputs ``(N, K)`` of features ``(N, F)``."""
        found: Tensor = self.linear(features[:, -self.linear.in_features :])
        return found


class LayerInput(nn.Module):
    """What enters one layer of a network, named as in ``model.named_modules()``, as a module; nothing is changed.

    Of several layers, with commas between their names, it is flattened and concatenated.
    """

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        self.model = model
        self.layer = layer
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(N, F)`` of inputs ``(N, ...)``."""
        calls: dict[str, list[Tensor]] = {name: [] for name in layer_names(self.layer)}
        with ExitStack() as stack:
            for name, seen in calls.items():
                # The layer is looked up at each call, so that copies of this module observe their own network.
                hook = self.model.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, named, seen=seen: seen.append(args[0] if args else named["input"]), with_kwargs=True
                )
                stack.enter_context(hook)
            self.model(x)
        for name, seen in calls.items():
            if len(seen) != 1:
                raise SplitError(
                    f"layer {name!r} was called {len(seen)} times in one forward pass, expected once; "
                    "give a pair (features, readout) instead"
                )
        found = [part for seen in calls.values() for part in seen]
        return found[0] if len(found) == 1 else torch.cat([part.flatten(1) for part in found], 1)


def layer_names(layer: str) -> list[str]:
    """Names of layers that are written with commas between them.

    Example:
        >>> layer_names("conv2, fc")
        ['conv2', 'fc']
    """
    return list(dict.fromkeys(name.strip() for name in layer.split(",")))


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


def split(
    model: nn.Module | tuple[Any, Any], inputs: Tensor, *, layer: str | None = None, tolerance: float = 1e-4
) -> Split:
    """Split a classifier, or take a pair ``(features, readout)``, verified on a few ``inputs``, float32 ``(n, ...)``.

    The linear ``layer`` that makes the logits is found when left out; before it, with commas, others may be named,
    whose inputs are features too. A pair's features may be of any shape ``(n, *F)``. Raises SplitError where there is
    no such layer, or the parts differ from the model by more than ``tolerance`` relative to the largest logit.
    """
    pair = as_parts(model)
    if pair is not None:
        whole = nn.Sequential(*pair)
        whole.training = any(part.training for part in pair)
        check_classifier(whole, inputs)
        return Split(*pair, shape=tuple(_check_features(pair[0], inputs).shape[1:]))
    network: Any = model
    tolerance = tolerance_of(network, single=tolerance)
    # A random model draws the same each time.
    with seeded_globals(0):
        logits = check_classifier(network, inputs)
    linear = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear)}
    if layer is None:
        layer = _last_linear(network, linear, inputs, logits, tolerance)
    layers = layer_names(layer)
    if layers[-1] not in linear:
        known, last = ", ".join(list(linear)[-5:]) or "none", "" if len(layers) == 1 else " as the last one"
        raise SplitError(
            f"layer: got {layer!r}, expected the name of an nn.Linear of the model{last} (the last ones: {known})"
        )
    parts, last_linear = dict(network.named_modules()), linear[layers[-1]]
    for name in layers[:-1]:
        if name not in parts:
            raise SplitError(f"layer: got {name!r}, expected the name of a module of the model, see named_modules()")
    readout: nn.Module = last_linear if len(layers) == 1 else LastPart(last_linear)
    seen = LayerInput(network, ",".join(layers))
    features = _check_features(seen, inputs)
    if features.dim() != 2:
        raise SplitError(
            f"features: got shape {tuple(features.shape)} for {inputs.shape[0]} inputs, expected "
            f"({inputs.shape[0]}, F); flatten them before the readout"
        )
    if weights_type(readout) != features.dtype:
        # Under autocast, features come in a coarser type than the weights.
        readout = InPrecision(readout, precision=features.dtype, dtype=weights_type(readout))
    result = Split(seen, readout, ",".join(layers), tuple(features.shape[1:]))
    with torch.no_grad():
        output: Tensor = result.readout(features)
    if output.shape != logits.shape:
        raise SplitError(
            f"layer {layer!r}: got outputs of shape {tuple(output.shape)}, expected the model's logits of shape "
            f"{tuple(logits.shape)}; name the last linear layer"
        )
    difference = float((output - logits).abs().max())
    if difference > tolerance * (1 + float(logits.abs().max())):
        raise SplitError(
            f"layer {layer!r}: the logits differ from the model's by up to {difference:.3g}, so something follows that "
            "layer; fold it into the layer's weights, or give a pair (features, readout)"
        )
    return result


def _check_features(part: nn.Module, inputs: Tensor) -> Tensor:
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
        if output.shape == logits.shape and float((output - logits).abs().max()) <= tolerance * (
            1 + float(logits.abs().max())
        ):
            return name
    raise SplitError(
        f"model: the last linear layer {outputs[-1][0]!r} does not produce the logits (something follows it); name the "
        "layer, fold what follows into its weights, or give a pair (features, readout)"
    )
