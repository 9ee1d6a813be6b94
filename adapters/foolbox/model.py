"""Foolbox models as modules."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.adapter import AdaptedModel
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.errors import InvalidArgumentError, ModelError


class FoolboxModule(nn.Module):
    """A Foolbox model as a module: it calls the model, so that preprocessing and wrappers are kept.

    The network inside is registered as a submodule, so that hooks, ``named_modules``, ``parameters``, ``train`` and
    ``eval`` reach it.

    Args:
        model: A Foolbox model that takes and returns PyTorch tensors.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        # In a tuple, a model that is also an nn.Module is not registered a second time.
        self._foolbox = (model,)
        networks = list(dict.fromkeys(_networks(model)))
        if len(networks) == 1:
            self.network = networks[0]
        else:
            self.networks = nn.ModuleList(networks)
        self.training = any(network.training for network in networks)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, K)`` of inputs ``(N, ...)`` in the Foolbox model's bounds; gradients flow."""
        # Foolbox turns gradients on wherever the input asks for them, even below torch.no_grad().
        out: Tensor = self._foolbox[0](x if torch.is_grad_enabled() else x.detach())
        return out


def adapt_model(model: Any) -> AdaptedModel:
    """Turn a Foolbox model into a module and its bounds.

    Raises:
        InvalidArgumentError: It is an object of Foolbox but no model.
        ModelError: It is a model of another framework than PyTorch.
    """
    if not isinstance(model, foolbox.models.Model):
        raise InvalidArgumentError(
            "model", f"foolbox's {type(model).__name__}", "a foolbox.models.Model, such as PyTorchModel"
        )
    others = (foolbox.models.TensorFlowModel, foolbox.models.JAXModel, foolbox.models.NumPyModel)
    for part in _parts(model):
        if isinstance(part, others):
            raise ModelError(f"model: {type(part).__name__} runs outside PyTorch; pass a foolbox.PyTorchModel")
    low, high = (float(value) for value in model.bounds)
    return AdaptedModel(module=FoolboxModule(model), bounds=(low, high))


def _parts(model: Any) -> Iterator[Any]:
    """The model and the models it wraps."""
    yield model
    for value in vars(model).values():
        if isinstance(value, foolbox.models.Model):
            yield from _parts(value)


def _networks(model: Any) -> Iterator[nn.Module]:
    """The PyTorch networks that a model and its wrappers hold."""
    for part in _parts(model):
        for value in vars(part).values():
            if isinstance(value, nn.Module):
                yield value
            elif inspect.isfunction(value):
                # PyTorchModel keeps its network only inside the function that calls it.
                held = inspect.getclosurevars(value).nonlocals.values()
                yield from (entry for entry in held if isinstance(entry, nn.Module))
