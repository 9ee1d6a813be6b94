"""The operations of one forward pass, in order, and which of their tensors depend on the input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.models.features.observed import first_argument, operation_name

# They return nothing, and change their first argument.
_ASSIGNING = ("setitem",)


@dataclass(frozen=True)
class Call:
    """One operation that returned tensors, or changed one."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def name(self) -> str:
        """One name for the function, the method and the operator."""
        return operation_name(self.func)

    @property
    def taken(self) -> list[Tensor]:
        """Tensors among its arguments."""
        return list(tensors_in((self.args, self.kwargs)))

    @property
    def made(self) -> list[Tensor]:
        """Tensors that it returned, or the one that it changed."""
        found = list(tensors_in(self.out))
        return found if found or self.name not in _ASSIGNING else list(tensors_in(self.args[:1]))


@dataclass(frozen=True)
class Entered:
    """A call of a module: its name, what it was called with first, and how many operations came before."""

    layer: str
    value: Any
    before: int


class Recording(TorchFunctionMode):
    """The forward pass of one row ``(1, ...)`` through a model, with weights that require no gradients meanwhile.

    Everything that was computed is held, so that identities stay apart.
    """

    def __init__(self, model: nn.Module, row: Tensor) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.entered: list[Entered] = []
        self.autocast: torch.dtype | None = None  # Of operations outside of layers.
        with ExitStack() as stack:
            for name, part in model.named_modules():
                if isinstance(part, torch.jit.ScriptModule):
                    continue  # Takes no hooks.
                stack.enter_context(part.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            stack.enter_context(frozen(model))
            stack.enter_context(seeded_globals(0))
            stack.enter_context(torch.enable_grad())
            # No leaf, which could not be changed in place.
            self.x = row.detach().clone().requires_grad_().clone()
            self._dependent = {id(self.x)}
            with self:
                self.logits: Tensor = model(self.x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        call = Call(func, args, kwargs or {}, out)
        made = call.made
        if made:
            self.calls.append(call)
            # While weights require none, what has a gradient depends on the input, whatever made it.
            taken = call.taken
            self._dependent.update(id(one) for one in taken if one.requires_grad)
            if any(map(self.depends, taken)):
                self._dependent.update(map(id, made))
            kind = self.x.device.type
            if torch.is_autocast_enabled(kind):
                self.autocast = torch.get_autocast_dtype(kind)
        return out

    def depends(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the input: by the operations that made it, or by its gradient."""
        return id(tensor) in self._dependent

    @cached_property
    def makers(self) -> dict[int, list[int]]:
        """By the identity of a tensor, the numbers of the operations that returned or changed it."""
        found: dict[int, list[int]] = {}
        for number, call in enumerate(self.calls):
            for tensor in call.made:
                found.setdefault(id(tensor), []).append(number)
        return found

    def made_before(self, tensor: Tensor, number: int) -> int:
        """How many operations there were when a tensor had the value with which it is used in one of them."""
        return max((maker + 1 for maker in self.makers.get(id(tensor), []) if maker < number), default=0)

    def _entering(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, args: Any, named: Any) -> None:
            self.entered.append(Entered(name, first_argument(args, named), len(self.calls)))

        return hook


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
