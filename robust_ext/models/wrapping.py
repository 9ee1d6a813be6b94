"""Modules around others: wrappers that keep the names of layers, normalised or rescaled inputs, padded classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_integer, check_number


class Wrapped(nn.Module):
    """A module around another one, ``module``, in its mode.

    ``named_modules`` and ``get_submodule`` have the layers inside under the names they have in that module, so that
    ``layer="fc"`` means the same with and without the wrapper, and so do the names in findings.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This one, then the module inside as ``module``, then that one's parts by their own names."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        inside = f"{prefix}.module" if prefix else "module"
        for name, part in self.module.named_modules(memo, prefix, remove_duplicate):
            yield inside if part is self.module else name, part

    def get_submodule(self, target: str) -> nn.Module:
        """The part of that name, as ``named_modules`` has them."""
        return self if not target else self.module if target == "module" else self.module.get_submodule(target)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module inside all wrappers."""
    while isinstance(module, Wrapped):
        module = module.module
    return module


def module_of(model: Any) -> Any:
    """The module of a model of any type that :func:`robust_ext.as_module` takes; functions and anything else unchanged.

    A Foolbox model, an ART classifier or a name becomes the module that evaluations run, with the layer names that
    their findings print.
    """
    if isinstance(model, nn.Module) or inspect.isroutine(model) or inspect.isclass(model):
        return model
    # The public face: models lie below the registry, which recognises models of other libraries.
    from robust_ext import as_module

    try:
        return as_module(model).module
    except InvalidArgumentError:
        if isinstance(model, str):
            raise
        return model


class Rescaled(nn.Module):
    """A module of inputs in the bounds ``inner``, as one of inputs in ``outer``."""

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
    least 110, and a thousandth of the largest logit more, which float32 keeps apart. So decisions stay, the softmax has
    exact zeros there, cross-entropy has the same value and gradient, and the DLR of two classes rises with the margin
    alone. ``classes`` is the number of columns in the end.

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

    Example:
        >>> Normalized(nn.Identity(), mean=(0.5, 0.0), std=(0.5, 0.25))(torch.ones(1, 2, 1, 1)).flatten()
        tensor([1., 4.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, module: nn.Module, *, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__(module)
        means, stds = (
            [check_number(name, one) for one in (given if isinstance(given, (list, tuple)) else [given])]
            for name, given in (("mean", mean), ("std", std))
        )
        if not means or not stds:
            raise InvalidArgumentError("std" if means else "mean", [], "a number, or one for each channel")
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
