"""A module of inputs in some bounds, as one of inputs in others."""

from __future__ import annotations

from torch import Tensor, nn


class Rescaled(nn.Module):
    """A module of inputs in the bounds ``inner``, as one of inputs in ``outer``.

    Example:
        >>> import torch
        >>> Rescaled(nn.Identity(), (-1.0, 1.0), (0.0, 255.0))(torch.tensor([[0.0, 127.5, 255.0]]))
        tensor([[-1.,  0.,  1.]])
    """

    def __init__(self, module: nn.Module, inner: tuple[float, float], outer: tuple[float, float] = (0.0, 1.0)) -> None:
        super().__init__()
        self.module = module
        self.inner = inner
        self.outer = outer
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """The module's output at the point that lies in ``inner`` where x lies in ``outer``."""
        (low, high), (least, most) = self.inner, self.outer
        out: Tensor = self.module((x - least) / (most - least) * (high - low) + low)
        return out
