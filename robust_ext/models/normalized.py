"""A module of normalised inputs, as one of inputs in the bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_number
from robust_ext.models.wrapping import Wrapped


class Normalized(Wrapped):
    """A module of inputs ``(x - mean) / std``, as one of x itself, so that budgets are in the units of x.

    Args:
        module: The module.
        mean: A number for each channel of the inputs ``(N, C, ...)``, or one for all.
        std: Likewise, above 0.

    Raises:
        InvalidArgumentError: They are no finite numbers, or not equally many.

    Example:
        >>> Normalized(nn.Identity(), mean=(0.5, 0.0), std=(0.5, 0.25))(torch.ones(1, 2, 1, 1)).flatten()
        tensor([1., 4.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, module: nn.Module, *, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__(module)
        means, stds = _numbers("mean", mean), _numbers("std", std)
        if min(stds) <= 0:
            raise InvalidArgumentError("std", stds, "numbers above 0")
        if 1 < len(means) != len(stds) > 1:
            raise InvalidArgumentError("std", stds, f"one number, or {len(means)} as in mean")
        # They are no weights: a state dict of the module has all but the prefix of its names.
        self.register_buffer("mean", torch.tensor(means), persistent=False)
        self.register_buffer("std", torch.tensor(stds), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The module's output at the normalised inputs ``(N, C, ...)``."""
        channels = max(len(self.mean), len(self.std))
        if channels > 1 and x.shape[1] != channels:
            raise InvalidArgumentError("inputs", f"shape {tuple(x.shape)}", f"{channels} channels, one for each mean")
        shape = (-1, *(1,) * (x.dim() - 2))
        out: Tensor = self.module((x - self.mean.view(shape)) / self.std.view(shape))
        return out

    def extra_repr(self) -> str:
        """Its numbers."""
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


def _numbers(argument: str, given: float | Sequence[float]) -> list[float]:
    values = list(given) if isinstance(given, (list, tuple)) else [given]
    if not values:
        raise InvalidArgumentError(argument, given, "a number, or one for each channel")
    return [check_number(argument, value) for value in values]
