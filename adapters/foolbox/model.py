"""Foolbox models as modules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.models.compiled import evaluable
from robust_ext.registry.base import AdaptedModel

_as_eager = foolbox.models.base.ep.astensor


class FoolboxModule(nn.Module):
    """A Foolbox model as a module: preprocessing and wrappers are kept, gradients flow through them.

    The network inside is registered as a submodule, so that hooks, ``named_modules``, ``parameters``, ``train`` and
    ``eval`` reach it. The module can be copied and moved to another device or type like any other, preprocessing
    included; the Foolbox model it was made of stays as it was, but for its network, which both share.
    """

    library = "foolbox"

    def __init__(self, model: Any) -> None:
        super().__init__()
        opened, networks = _opened(model)
        # In a tuple, a model that is also an nn.Module is not registered a second time.
        self._foolbox = (opened,)
        if len(networks) == 1:
            self.network = networks[0]
        else:
            self.networks = nn.ModuleList(networks)
        self.training = any(network.training for network in networks)

    def forward(self, x: Tensor) -> Any:
        """Return logits ``(N, K)``, or the network's other output, for inputs ``(N, ...)`` in the model's bounds."""
        model = self._foolbox[0]
        if type(model) is not foolbox.PyTorchModel:
            return model(x)
        # Foolbox itself raises where a network returns more than one tensor.
        return model._model(model._preprocess(_as_eager(x)).raw)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FoolboxModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Foolbox keeps mean and standard deviation in tensors that are no part of a module.
        for part in _parts(self._foolbox[0]):
            if isinstance(part, foolbox.models.base.ModelWithPreprocessing):
                mean, std, flip_axis = part._preprocess_args
                moved = (None if values is None else _as_eager(fn(values.raw)) for values in (mean, std))
                part._preprocess_args = (*moved, flip_axis)
        return self


def adapt_model(model: Any) -> AdaptedModel:
    """Turn a Foolbox model into a module and its bounds; ModelError for one of another framework than PyTorch."""
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
    """Yield the model and the models it wraps."""
    yield model
    for value in vars(model).values():
        if isinstance(value, foolbox.models.Model):
            yield from _parts(value)


def _opened(model: Any) -> tuple[Any, list[nn.Module]]:
    """Copy a model and the models it wraps; return the copy, which exposes their shared networks, and these networks.

    PyTorchModel keeps its network inside a function, where neither a copy nor a move of the module would find it.
    """
    opened, networks = copy.copy(model), []
    for name, value in vars(model).items():
        if isinstance(value, foolbox.models.Model):
            inner, found = _opened(value)
            setattr(opened, name, inner)
            networks += found
        elif isinstance(value, nn.Module):
            network = evaluable(value)
            setattr(opened, name, network)
            networks.append(network)
        elif inspect.isfunction(value):
            held = inspect.getclosurevars(value).nonlocals.values()
            found = [evaluable(entry) for entry in held if isinstance(entry, nn.Module)]
            networks += found
            if isinstance(model, foolbox.PyTorchModel) and name == "_model" and len(found) == 1:
                setattr(opened, name, found[0])
    return opened, list(dict.fromkeys(networks))
