"""Foolbox models as modules: those of PyTorch opened, those of JAX and TensorFlow through their own gradients."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from robust_ext.adapters.bridge import ForeignFunction, bridged, noted
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.jax import JaxFunction
from robust_ext.adapters.tensorflow import TensorFlowFunction
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.models.black_box import BlackBox
from robust_ext.models.forms import evaluable
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
    """Turn a Foolbox model into a module and its bounds; a NumPyModel is a black box that returns logits."""
    if not isinstance(model, foolbox.models.Model):
        raise InvalidArgumentError(
            "model", f"foolbox's {type(model).__name__}", "a foolbox.models.Model, such as PyTorchModel"
        )
    low, high = (float(value) for value in model.bounds)
    parts = list(_parts(model))
    for part in parts:
        if isinstance(part, foolbox.models.NumPyModel):
            return AdaptedModel(module=BlackBox(_InNumpy(model), returns="logits"), bounds=(low, high))
        if isinstance(part, (foolbox.models.TensorFlowModel, foolbox.models.JAXModel)):
            return AdaptedModel(module=_of_framework(model, parts), bounds=(low, high))
    return AdaptedModel(module=FoolboxModule(model), bounds=(low, high))


class _InNumpy:
    """A model of Foolbox around a function of numpy arrays, as such a function."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, x: Any) -> Any:
        return self.model(x)


def _of_framework(model: Any, parts: list[Any]) -> nn.Module:
    """Return a TensorFlow or JAX model with its wrappers as a module, called with the framework's own tensors."""
    last = parts[-1]
    if isinstance(last, foolbox.models.TensorFlowModel):
        function: ForeignFunction = TensorFlowFunction(model)
    else:
        # Wrappers that draw random numbers would draw them once.
        fixed = (foolbox.models.JAXModel, foolbox.models.TransformBoundsWrapper, foolbox.models.ThresholdingWrapper)
        function = JaxFunction(model, jit=all(isinstance(part, fixed) for part in parts))
    module = bridged(function, channels_last=getattr(last, "data_format", None) == "channels_last")
    return noted(module, library="foolbox")


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
