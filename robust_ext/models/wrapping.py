"""Modules around a user's network that change what goes in or comes out, and keep the names of its layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from robust_ext.core.errors import InvalidArgumentError


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
    """Return the user's module inside all wrappers.

    Example:
        >>> unwrapped(Wrapped(Wrapped(nn.Flatten())))
        Flatten(start_dim=1, end_dim=-1)
    """
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
    # The public face: models lie below the registry, which knows what other libraries' models are.
    from robust_ext import as_module

    try:
        return as_module(model).module
    except InvalidArgumentError:
        if isinstance(model, str):
            raise
        return model
