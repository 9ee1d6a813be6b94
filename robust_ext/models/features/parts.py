"""The two halves of a classifier, and the modules that stand for a half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, SplitError
from robust_ext.core.random import seeded_globals

# Of the largest logit, in single precision; in coarser ones more.
TOLERANCE = 1e-4


def check_features(part: nn.Module, inputs: Tensor) -> Tensor:
    """Features of ``inputs`` ``(n, ...)``; SplitError where they are no tensor of n rows."""
    with torch.no_grad(), seeded_globals(0):
        features: Tensor = part(inputs)
    if not isinstance(features, Tensor):
        raise SplitError(f"features: got {type(features).__name__}, expected a tensor (n, F)")
    if features.dim() < 2 or features.shape[0] != inputs.shape[0]:
        raise SplitError(
            f"features: got shape {tuple(features.shape)} for {inputs.shape[0]} inputs, expected "
            f"({inputs.shape[0]}, F), or more dimensions for a readout that takes them"
        )
    return features


@dataclass(frozen=True)
class Split:
    """A classifier as features ``(N, *shape)`` and their readout; ``layer`` names it where layers have names.

    ``kind`` is how the logits follow from the features: ``"pair"`` (the user's two modules), ``"linear"`` (an
    ``nn.Linear`` of the model), ``"replayed"`` (the operations behind the features, run again), ``"beside"`` (the
    logits are features too, next to averages of a large map), ``"logits"`` (the logits are the features).
    """

    features: nn.Module
    readout: nn.Module
    layer: str = ""
    shape: tuple[int, ...] = ()
    kind: str = "linear"


class Part(nn.Module):
    """A callable part of a classifier, such as a method of a network, as a module in eval mode."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        owner = getattr(function, "__self__", None)
        # So that its weights count as this module's.
        self.owner = owner if isinstance(owner, nn.Module) else None
        self.function = function
        self.training = self.owner is not None and self.owner.training

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's output."""
        return self.function(x)


class LastPart(nn.Module):
    """A linear layer that reads the last of features that were concatenated, in its own precision."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.training = linear.training

    def forward(self, features: Tensor) -> Tensor:
        """The layer's outputs ``(N, K)`` of features ``(N, F)``."""
        found: Tensor = self.linear(features[:, -self.linear.in_features :].to(self.linear.weight.dtype))
        return found


class LastColumns(nn.Module):
    """The last ``columns`` of features: the logits, where they are features too."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.training = False

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(N, K)`` of features ``(N, F)``."""
        return features[:, -self.columns :]


def as_parts(model: object) -> tuple[nn.Module, nn.Module] | None:
    """A pair ``(features, readout)`` as modules, each of which may be any callable; None for what is no pair."""
    if not isinstance(model, (tuple, list)):
        return None
    if len(model) != 2 or not all(callable(part) for part in model):
        shown = ", ".join(type(part).__name__ for part in model)
        expected = "a pair (features, readout) of torch modules or callables"
        raise InvalidArgumentError("model", f"({shown})", expected)
    features, readout = (part if isinstance(part, nn.Module) else Part(part) for part in model)
    return features, readout
