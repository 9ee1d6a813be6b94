"""Features and readout: a classifier as ``readout o features``, found by itself or named.

Ordinary networks end in one linear layer. It is found by watching which ``nn.Linear`` produces the logits in one
forward pass, so functional code, skips and wrapped models work without tracing; the result is verified.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import InvalidArgumentError, SplitError


@dataclass(frozen=True)
class Split:
    """A classifier as features ``(N, F)`` and their readout; ``layer`` names it, empty for a user's pair."""

    features: nn.Module
    readout: nn.Module
    layer: str = ""


class LayerInput(nn.Module):
    """What enters one layer of a network, named as in ``model.named_modules()``, as a module; nothing is changed."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        self.model = model
        self.layer = layer
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(N, F)`` of inputs ``(N, ...)``."""
        calls: list[Tensor] = []
        # The layer is looked up at each call, so that copies of this module observe their own network.
        with self.model.get_submodule(self.layer).register_forward_pre_hook(
            lambda _, args, named: calls.append(args[0] if args else named["input"]), with_kwargs=True
        ):
            self.model(x)
        if len(calls) != 1:
            raise SplitError(
                f"layer {self.layer!r} was called {len(calls)} times in one forward pass, expected once; "
                "give a pair (features, readout) instead"
            )
        return calls[0]


def split(
    model: nn.Module | tuple[nn.Module, nn.Module], inputs: Tensor, *, layer: str | None = None, tolerance: float = 1e-4
) -> Split:
    """Split a classifier, or take a pair ``(features, readout)``, verified on a few ``inputs``, float32 ``(n, ...)``.

    The linear ``layer`` that makes the logits is found when left out. Raises SplitError where there is no such layer,
    or the parts differ from the model by more than ``tolerance`` relative to the largest logit.
    """
    if isinstance(model, (tuple, list)):
        if len(model) != 2 or not all(isinstance(part, nn.Module) for part in model):
            raise InvalidArgumentError("model", model, "a pair (features, readout) of torch modules")
        result = Split(model[0], model[1])
        whole = nn.Sequential(*model)
        whole.training = any(part.training for part in model)
        check_classifier(whole, inputs)
        _check_features(result, inputs)
        return result
    logits = check_classifier(model, inputs)
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    if layer is None:
        layer = _last_linear(model, linear, inputs, logits, tolerance)
    elif layer not in linear:
        known = ", ".join(list(linear)[-5:]) or "none"
        raise SplitError(
            f"layer: got {layer!r}, expected the name of an nn.Linear of the model (the last ones: {known})"
        )
    result = Split(LayerInput(model, layer), linear[layer], layer)
    features = _check_features(result, inputs)
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


def _check_features(parts: Split, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        features: Tensor = parts.features(inputs)
    if not isinstance(features, Tensor):
        raise SplitError(f"features: got {type(features).__name__}, expected a tensor (n, F)")
    if features.dim() != 2 or features.shape[0] != inputs.shape[0]:
        raise SplitError(
            f"features: got shape {tuple(features.shape)} for {inputs.shape[0]} inputs, expected "
            f"({inputs.shape[0]}, F); flatten them before the readout"
        )
    return features


def _last_linear(
    model: nn.Module, linear: dict[str, nn.Linear], inputs: Tensor, logits: Tensor, tolerance: float
) -> str:
    """Name of the linear layer whose output is the model's."""
    outputs: list[tuple[str, Tensor]] = []
    with ExitStack() as stack, torch.no_grad():
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
