"""The target as torchattacks meets it: a module of images."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from robust_ext.core.target import Target


class HostModule(nn.Module):
    """A target as a module of images ``(N, C, H, W)``, regardless of the shape of its inputs.

    torchattacks puts the model it attacks into eval mode, and then back into train mode if it was there: a target whose
    parts are in different modes would be attacked as another model than it is judged as, and would not be as before.
    So its modes are left alone, unless ``follows`` is set for an attack that needs train mode. Images have at least
    ``channels`` channels; missing ones are zeros that the target does not see, so no gradient comes from them.
    With ``positive``, logits are shifted, sample by sample, to be at least 0.
    """

    def __init__(self, target: Target, *, channels: int = 1, positive: bool = False, follows: bool = False) -> None:
        super().__init__()
        # torchattacks takes its device from the first parameter, and prints a warning without one.
        self.place = nn.Parameter(torch.empty(0, device=target.device), requires_grad=False)
        self.module = target.module
        self.input_shape = target.input_shape
        self.shape = image_shape(target.input_shape)
        self.missing = max(channels - self.shape[0], 0)
        self.positive = positive
        self.follows = follows
        self.training = target.module.training

    @property
    def needed(self) -> bool:
        """True if torchattacks would fail on, or change, the target's own module."""
        eval_mode = not any(part.training for part in self.module.modules())
        own_device = any(True for _ in self.module.parameters())
        return self.missing > 0 or self.positive or len(self.input_shape) != 3 or not (eval_mode and own_device)

    def train(self, mode: bool = True) -> HostModule:
        """Pass the mode on where the attack needs train mode, else leave all as it is."""
        return super().train(mode) if self.follows else self

    def enter(self, x: Tensor) -> Tensor:
        """Return a copy of inputs ``(N, *input_shape)``, as images."""
        images = x.reshape(len(x), *self.shape)
        return torch.cat([images, images.new_zeros(len(x), self.missing, *self.shape[1:])], 1)

    def leave(self, images: Tensor) -> Tensor:
        """Return images as inputs; those of another height and width keep it."""
        seen = images[:, : self.shape[0]]
        return seen if len(self.input_shape) == 3 else seen.reshape(len(images), *self.input_shape)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(N, classes)``."""
        logits: Tensor = self.module(self.leave(images))
        return logits - logits.detach().amin(1, keepdim=True).clamp(max=0) if self.positive else logits


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return channels, height and width of an input of any shape.

    Example:
        >>> image_shape((3, 32, 32)), image_shape((28, 28)), image_shape((10,)), image_shape((3, 8, 32, 32))
        ((3, 32, 32), (1, 28, 28), (1, 1, 10), (3, 256, 32))
    """
    shape = (1,) * (3 - len(shape)) + shape
    return shape[0], math.prod(shape[1:-1]), shape[-1]
