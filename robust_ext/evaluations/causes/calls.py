"""Calls of modules and operations, kept so that they can be made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Operation:
    """A call of an operation or module, which can be made again; tensors are detached copies.

    ``name`` is that of the operation; of a module as in ``named_modules()``, empty for the model itself.
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
        """Return the floating point tensors that it returns for these arguments; its own where left out."""
        given = iter(self.points if points is None else points)
        args, kwargs = _mapped(lambda _: next(given).clone(), (self.args, self.kwargs))
        return tensors(self.function(*args, **kwargs))


@dataclass(eq=False)
class Call(Operation):
    """A call of a module.

    Attributes:
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
    grad_mode: bool
    leaf: bool = True
    same_shape: bool = False
    finite: tuple[bool, bool] = (True, True)
    operations: list[str] = field(default_factory=list)
    inline: list[Operation] = field(default_factory=list)
    gradient: Tensor | None = None
    passed: Tensor | None = None


class Place(NamedTuple):
    """The call of a module, and the operation in it (empty where unknown)."""

    call: Call
    operation: str


def named(call: Call | None) -> str:
    """Return a module as text: its name and class."""
    if call is None:
        return "the model"
    kind = type(call.module).__name__
    return f"{call.name} ({kind})" if call.name else f"the model itself ({kind}.forward)"


def tensors(value: Any) -> list[Tensor]:
    """Return the floating point tensors in tuples, lists and dicts of anything."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    each = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [one for part in each for one in tensors(part)]


def copied(value: Any) -> Any:
    """Return tuples, lists and dicts of anything, with detached copies of their floating point tensors."""
    with torch._C.DisableTorchFunction():
        return _mapped(lambda tensor: tensor.detach().clone(), value)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        made = [_mapped(change, each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value
