"""A target as Foolbox meets it: modules around its own, where an attack fails on its logits or gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# exp(80) times thousands of classes is still a float32.
_HIGHEST = 80.0
# So large a gradient makes the step of NewtonFool negligible; other attacks take the direction only.
_STEEP = 1e6


class LowLogits(nn.Module):
    """Logits ``(N, K)``, shifted sample by sample so that none is above 80; where none is, they are left as they are.

    GenAttack takes the exponential of logits as they come, which overflows above 88.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, K)``."""
        logits: Tensor = self.module(x)
        return logits - (logits.amax(1, keepdim=True) - _HIGHEST).clamp_min(0)


class NeverFlat(nn.Module):
    """A module whose gradient at the input vanishes in no sample, for attacks that divide by its size.

    A sample whose gradient vanishes gets a large one in all values alike; others are left as they are. It has vanished
    where its size to the (even) ``power`` is zero, in its own type.
    """

    def __init__(self, module: nn.Module, *, power: int) -> None:
        super().__init__()
        self.module = module
        self.power = power
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, K)``."""
        if x.requires_grad:
            # A hook on the caller's own tensor would stay on it.
            x = x.view_as(x)
            x.register_hook(self._steepen)  # type: ignore[no-untyped-call]
        out: Tensor = self.module(x)
        return out

    def _steepen(self, gradient: Tensor) -> Tensor:
        size = gradient.flatten(1).square().sum(1) ** (self.power // 2)
        vanished = (size == 0).view(-1, *[1] * (gradient.dim() - 1))
        return torch.where(vanished, _STEEP, gradient)
