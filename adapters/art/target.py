"""A target as ART meets it: one module inside an ART classifier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.adapters.art.library import art
from robust_ext.core.errors import AttackError
from robust_ext.core.target import Target


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
    return art.estimators.classification.PyTorchClassifier(
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
