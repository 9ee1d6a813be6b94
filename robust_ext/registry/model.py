"""Models of any kind as modules."""

from __future__ import annotations

from torch import nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.registry.base import AdaptedModel, adapters


def as_module(model: object, *, argument: str = "model") -> AdaptedModel:
    """Turn a model into a module from inputs to logits, with the bounds it states.

    Args:
        model: An ``nn.Module`` (returned as it is, without bounds), or a model of an adapted library: a Foolbox model,
            an ART classifier. Their preprocessing becomes part of the module.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: It is none of these.
        ModelError: The library's model cannot be expressed as a module; the text states why.

    Example:
        >>> from torch import nn
        >>> as_module(nn.Linear(3, 2))
        AdaptedModel(module=Linear(in_features=3, out_features=2, bias=True), bounds=None)
    """
    if isinstance(model, nn.Module):
        return AdaptedModel(module=model, bounds=None)
    for adapter in adapters().values():
        adapted = adapter.adapt_model(model)
        if adapted is not None:
            return adapted
    libraries = ", ".join(sorted(adapters())) or "none installed"
    expected = f"a torch.nn.Module, or a model of an adapted library ({libraries})"
    raise InvalidArgumentError(argument, type(model).__name__, expected)
