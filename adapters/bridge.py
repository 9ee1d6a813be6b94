"""Functions of other frameworks as torch modules, whose backward pass is the framework's own."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from robust_ext.core.errors import ModelError
from robust_ext.models.features.tail import InParts
from robust_ext.models.vjp import VJP, attach, wants_gradient


class ForeignFunction(ABC):
    """A function of another framework's arrays, called with torch tensors.

    Copies of a module share it: attacks cannot reach its weights. It crosses to another process as ``function`` and
    its settings do.
    """

    framework: str
    function: Callable[..., Any]

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """Return the function's output ``(N, ...)`` for ``(N, ...)``."""

    @abstractmethod
    def with_pullback(self, x: Tensor) -> tuple[Tensor, VJP]:
        """Return the output, and the function from its cotangent to that of ``x``; the framework's own."""

    def weights(self) -> Iterable[Any]:
        """Return the arrays that the function reads, as far as they are known, for its digest."""
        return ()

    def array_of(self, output: Any) -> Any:
        """Return an output; ModelError where it is no array."""
        if not hasattr(output, "shape") or not hasattr(output, "dtype"):
            raise ModelError(
                f"model: the {self.framework} function returned {type(output).__name__}, expected one array of logits "
                "(N, K); return the logits alone"
            )
        return output

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class Bridge(nn.Module):
    """A function of another framework as a module.

    Args:
        function: The function.
        channels_first: Whether inputs are images ``(N, C, H, W)`` that the function is given as ``(N, H, W, C)``.
    """

    def __init__(self, function: ForeignFunction, *, channels_first: bool = False) -> None:
        super().__init__()
        self.function = function
        self.channels_first = channels_first
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's output for inputs ``(N, ...)``; its gradient is that of the framework."""
        if not len(x):
            # Convolutions of TensorFlow take no batch without rows.
            empty: Tensor = self(torch.cat([x, x.new_zeros(1, *x.shape[1:])]))[:0]
            return empty
        x = x.movedim(1, -1) if self.channels_first else x
        if wants_gradient(x):
            return attach(self.function.with_pullback, x)
        return self.function.value(x.detach())

    def get_extra_state(self) -> str:
        """Return a digest of the weights, by which runs are told apart."""
        digest = hashlib.blake2b(digest_size=16)
        for weights in self.function.weights():
            digest.update(np.ascontiguousarray(weights).tobytes())
        return digest.hexdigest()

    def set_extra_state(self, state: str) -> None:
        """Leave the weights, which the framework holds."""

    def extra_repr(self) -> str:
        """Return the framework and the layout of images."""
        return f"{self.function.framework}, channels_first={self.channels_first}"


class Standardised(nn.Module):
    """Inputs minus a mean, divided by a deviation; both broadcast to inputs ``(N, ...)``."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Any, std: Any) -> None:
        super().__init__()
        self.register_buffer("mean", torch.as_tensor(np.asarray(mean, dtype=np.float32)), persistent=False)
        self.register_buffer("std", torch.as_tensor(np.asarray(std, dtype=np.float32)), persistent=False)
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the standardised inputs."""
        found: Tensor = (x - self.mean) / self.std
        return found


def bridged(
    whole: ForeignFunction,
    features: ForeignFunction | None = None,
    *,
    channels_first: bool = False,
    channels_last: bool = False,
    before: nn.Module | None = None,
) -> nn.Module:
    """Return a module of ``whole``, or of ``features`` followed by it, in eval mode, behind the module ``before``.

    With ``channels_first``, images come as ``(N, C, H, W)``, and functions get ``(N, H, W, C)``; ``channels_last`` says
    that functions are known to take the latter.
    """
    first: nn.Module = Bridge(whole if features is None else features, channels_first=channels_first)
    first = first if before is None else nn.Sequential(before, first).eval()
    module = first if features is None else InParts(first, Bridge(whole)).eval()
    return noted(module, channels_last=channels_last and not channels_first)


def noted(module: nn.Module, **notes: str | bool) -> nn.Module:
    """Note on a module its ``library``, by which findings name it, and whether it takes images ``channels_last``."""
    vars(module).update(notes)
    return module
