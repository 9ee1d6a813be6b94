"""Modules around others: normalised or rescaled inputs, and padded classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_integer, check_number
from robust_ext.models.wrapping import Wrapped


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


# exp(-104) is below half the smallest float32: a column this far below has no part in a softmax.
_BELOW = 110.0


class PaddedClasses(nn.Module):
    """A classifier with columns added that can never win, for attacks that compare more classes than there are.

    Losses on the third largest logit (DLR) and attacks that pick among other classes (SignOPT, Threshold) need at least
    three classes, and a binarized classifier has two. The added columns are the lowest real logit minus a constant: at
    least 110, and a thousandth of the largest logit more, which float32 keeps apart. So decisions stay as they are; the
    softmax of a float32 has exact zeros in the added columns, and cross-entropy has the same value and gradient; and
    the DLR of two classes is the margin over the margin plus that constant, which rises with the margin alone.
    ``classes`` is the number of columns in the end.

    Example:
        >>> PaddedClasses(nn.Identity(), classes=3)(torch.tensor([[1.0, 2.0]]))
        tensor([[   1.0000,    2.0000, -109.0020]])
    """

    def __init__(self, module: nn.Module, *, classes: int) -> None:
        super().__init__()
        self.module = module
        self.classes = check_integer("classes", classes, minimum=2)
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, classes)``."""
        logits: Tensor = self.module(x)
        missing = self.classes - logits.shape[1]
        if missing <= 0:
            return logits
        below = logits.amin(1, keepdim=True) - (_BELOW + logits.detach().abs().amax(1, keepdim=True) / 1000)
        return torch.cat([logits, below.expand(-1, missing)], 1)


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
