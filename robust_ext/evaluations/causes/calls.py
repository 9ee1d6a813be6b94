"""Calls of modules and operations, kept so that they can be made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Operation:
    """A call of an operation or module.

    Attributes:
        name: Of the operation; of a module as in ``named_modules()``, empty for the model itself.
        function: The called function.
        args: Positional arguments, tensors detached and copied.
        kwargs: Likewise.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def points(self) -> list[Tensor]:
        """Its floating point arguments."""
        return tensors((self.args, self.kwargs))

    def again(self, points: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the replacement's output for these arguments; its floating-point tensors."""
        given = iter(self.points if points is None else points)
        args, kwargs = mapped(lambda _: next(given).clone(), (self.args, self.kwargs))
        return tensors(self.function(*args, **kwargs))


@dataclass(eq=False)
class Call(Operation):
    """A call of a module.

    Attributes:
        module: The module that was called.
        leaf: Whether it called no other module.
        same_shape: Whether it returned one tensor of the shape of its one argument.
        finite: Whether all values were finite in its arguments, and in what it returned.
        operations: Names of the operations in its own ``forward``, in order.
        inline: Those of them that a gradient goes through, where it is no leaf.
        gradient: Norms ``(N,)`` of the gradient at its output, in float64; None where none arrived.
        passed: Likewise at its first argument with a gradient: what it passes on.
        grad_mode: Whether gradients were wanted where it was called.
    """

    module: nn.Module
    leaf: bool = True
    same_shape: bool = False
    finite: tuple[bool, bool] = (True, True)
    operations: list[str] = field(default_factory=list)
    inline: list[Operation] = field(default_factory=list)
    gradient: Tensor | None = None
    passed: Tensor | None = None
    grad_mode: bool = True

    def look_at_shape(self) -> None:
        """Set ``same_shape``, of a call that did not return where a gradient was wanted."""
        try:
            with torch.no_grad():
                self.same_shape = [one.shape for one in self.again()] == [one.shape for one in self.points]
        except Exception:
            self.same_shape = False


@dataclass(frozen=True)
class Place:
    """A place: the call of a module, and the operation in it (empty where unknown)."""

    call: Call
    operation: str


def tensors(value: Any) -> list[Tensor]:
    """The floating point tensors in tuples, lists and dicts of anything."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [one for each in value.values() for one in tensors(each)]
    return [one for each in value for one in tensors(each)] if isinstance(value, (tuple, list)) else []


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Tuples, lists and dicts of anything, with their floating point tensors changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: mapped(change, each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        made = [mapped(change, each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def copied(value: Any) -> Any:
    """Likewise, with detached copies of the tensors."""
    return mapped(lambda tensor: tensor.detach().clone(), value)
