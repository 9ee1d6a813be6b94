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


class Subject(nn.Module):
    """The target as ART meets it.

    ART probes a model with a row of ones while it constructs some attacks, to see whether it returns probabilities.
    Until ``answers`` is set such a probe is answered with zeros, which are none, and the target is not asked: a probe
    is no query of the attack, and a target may accept nothing but the rows of its batch. On numpy 2 some of ART's
    attacks send float64, so inputs are cast.

    Args:
        target: Whose module is asked.
        probabilities: Whether it answers with the softmax of the logits.
        channels_last: Whether it is asked for images of shape (height, width, channels).
    """

    def __init__(self, target: Target, *, probabilities: bool = False, channels_last: bool = False) -> None:
        super().__init__()
        self.module = target.module
        self.classes = target.classes
        self.probabilities = probabilities
        self.channels_last = channels_last
        self.answers = False
        # Attacks on features are given this layer: what ART hooks into is not a part of the target.
        self.logits = nn.Identity()
        # Some attacks ask the parameters what device they are on, and a target may have none.
        self.register_parameter("_device", nn.Parameter(torch.zeros((), device=target.device), requires_grad=False))
        self.training = target.module.training

    def forward(self, x: Tensor) -> Tensor:
        """Logits or probabilities ``(N, K)`` of inputs of any floating-point type."""
        if not self.answers:
            return x.new_zeros(len(x), self.classes)
        x = x.to(torch.float32)
        logits: Tensor = self.logits(self.module(x.movedim(-1, 1) if self.channels_last else x))
        return logits.softmax(1) if self.probabilities else logits


def make_estimator(subject: Subject, target: Target) -> Any:
    """A ``PyTorchClassifier`` around the subject.

    Raises:
        AttackError: The target is on a device that ART does not know.
    """
    if target.device.type not in ("cpu", "cuda"):
        raise AttackError(
            f"ART runs on the CPU and on CUDA devices, and the target is on {target.device}; move the model"
        )
    shape = target.input_shape
    return art.estimators.classification.PyTorchClassifier(
        model=subject,
        loss=nn.CrossEntropyLoss(),
        optimizer=None,
        input_shape=(*shape[1:], shape[0]) if subject.channels_last else shape,
        nb_classes=target.classes,
        channels_first=not subject.channels_last,
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
