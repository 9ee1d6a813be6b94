"""Keras 3 models on TensorFlow or JAX as torch modules. Importing this imports no Keras; using it does."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from robust_ext.adapters.bridge import ForeignFunction, bridged, noted
from robust_ext.adapters.host import required
from robust_ext.adapters.jax import JaxFunction
from robust_ext.adapters.tensorflow import TensorFlowFunction
from robust_ext.core.errors import InvalidArgumentError, ModelError, warn
from robust_ext.core.specification import did_you_mean
from robust_ext.registry.base import AdaptedModel, Adapter, comes_from


class Inference:
    """A Keras model in eval mode, or its last layer without the softmax, as a function of inputs ``(N, ...)``.

    Args:
        model: A model or layer that is called first; None for none.
        last: A dense layer whose affine map follows; None for none.
    """

    def __init__(self, model: Any, last: Any = None) -> None:
        self.model = model
        self.last = last

    @property
    def variables(self) -> list[Any]:
        """The variables of both."""
        return [*getattr(self.model, "variables", ()), *getattr(self.last, "variables", ())]

    def __call__(self, x: Any) -> Any:
        """Return the output."""
        import keras

        x = x if self.model is None else self.model(x, training=False)
        if self.last is None:
            return x
        x = keras.ops.matmul(x, self.last.kernel)
        return x if self.last.bias is None else x + self.last.bias


def keras_model(
    model: Any, *, layer: str | None = None, channels_first: bool = False, before: nn.Module | None = None
) -> nn.Module:
    """Return a Keras 3 model as a module of eval mode, whose gradients are those of its backend.

    A softmax at the end of a functional or sequential model is left out, with a warning: logits are what enters it.

    Args:
        model: A ``keras.Model`` from inputs to logits or probabilities ``(N, K)``; on the torch backend it is a module
            already, and returned.
        layer: Name of a layer whose output is the features that the binarization test reads. By default they are what
            enters the last dense layer, where that makes the logits, else the logits.
        channels_first: Whether inputs are ``(N, C, H, W)``, where the model takes ``(N, H, W, C)``. By default inputs
            are what the model takes.
        before: A torch module in front of it, such as a preprocessing.

    Raises:
        InvalidArgumentError: It is no Keras model, or has no such layer.
        MissingDependencyError: Keras is not installed.
        ModelError: It cannot be split at the layer.
    """
    required("keras", "keras", title="Keras", install='"robust-ext[keras]"')
    if not comes_from(model, "keras") or not hasattr(model, "get_layer"):
        raise InvalidArgumentError("model", type(model).__name__, "a keras.Model of Keras 3")
    if isinstance(model, nn.Module):
        if layer is not None or channels_first or before is not None:
            expected = "no settings for a model on the torch backend, which is a torch module already"
            raise InvalidArgumentError("model", f"{type(model).__name__} with settings", expected)
        return model
    import keras

    features, whole = _parts(model, layer)
    shape = getattr(model, "input_shape", None)
    image = keras.config.image_data_format() == "channels_last" and isinstance(shape, tuple) and len(shape) == 4
    first = None if features is None else _function(features)
    return bridged(
        _function(whole), first, channels_first=channels_first, channels_last=image and before is None, before=before
    )


def _parts(model: Any, layer: str | None) -> tuple[Inference | None, Inference]:
    """Return the features and what makes logits of them; without features, what makes logits of inputs."""
    import keras

    if not getattr(model, "inputs", None):
        if layer is not None:
            raise ModelError(
                "model: a subclassed Keras model has no graph to be split in; leave layer out, or write it as a "
                "functional model"
            )
        return None, Inference(model)
    output = model.outputs[0]
    last = output._keras_history.operation
    if isinstance(last, (keras.layers.Softmax, keras.layers.Activation)) and _is_softmax(last):
        _say_left_out(last)
        output = last.input
        last = output._keras_history.operation
    dense = last if isinstance(last, keras.layers.Dense) else None
    affine = dense if dense is not None and (_is_softmax(dense) or _is_linear(dense)) else None
    if dense is not None and _is_softmax(dense):
        _say_left_out(dense)
    if layer is None:
        if affine is None:
            return None, Inference(model if output is model.outputs[0] else _cut(model.inputs, output))
        return Inference(_cut(model.inputs, affine.input)), Inference(None, affine)
    names = [one.name for one in model.layers]
    if layer not in names:
        shown = ", ".join(names[-5:])
        expected = f"the name of a layer of the model{did_you_mean(layer, names) or f' (the last ones: {shown})'}"
        raise InvalidArgumentError("layer", repr(layer), expected)
    cut = model.get_layer(layer).output
    try:
        end = output if affine is None else affine.input
        head = None if end is cut else _cut(cut, end)
    except ValueError as error:
        raise ModelError(
            f"layer {layer!r}: the logits do not follow from its output alone ({error}); name a later one"
        ) from error
    return Inference(_cut(model.inputs, cut)), Inference(head, affine)


def _cut(inputs: Any, outputs: Any) -> Any:
    """The part of a model between these; with a name of its own it would be another each time, and no run resumed."""
    import keras

    return keras.Model(inputs, outputs, name="part")


def _is_softmax(layer: Any) -> bool:
    activation = getattr(layer, "activation", None)
    return type(layer).__name__ == "Softmax" or getattr(activation, "__name__", "") == "softmax"


def _is_linear(layer: Any) -> bool:
    return layer.activation is None or getattr(layer.activation, "__name__", "") == "linear"


def _say_left_out(layer: Any) -> None:
    warn(
        f"model: its layer {layer.name!r} is a softmax, which is left out: the logits are what enters it, with the "
        "same predictions"
    )


def _function(inference: Inference) -> ForeignFunction:
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        return TensorFlowFunction(inference, graph=True)
    if backend == "jax":
        return JaxFunction(partial(_stateless, inference), variables=partial(_values, inference))
    raise ModelError(f"model: the Keras backend is {backend!r}, expected 'tensorflow', 'jax' or 'torch'")


def _values(inference: Inference) -> list[Any]:
    return [one.value for one in inference.variables]


def _stateless(inference: Inference, values: list[Any], x: Any) -> Any:
    """Return the output with these values of the variables, none of which is constant in the compiled function."""
    import keras

    with keras.StatelessScope(state_mapping=list(zip(inference.variables, values, strict=True))):
        return inference(x)


class KerasAdapter(Adapter):
    """Keras 3 models."""

    name = "keras"

    def adapt_model(self, model: object) -> AdaptedModel | None:
        """Wrap a model."""
        if not comes_from(model, "keras") or not hasattr(model, "get_layer"):
            return None
        return AdaptedModel(module=noted(keras_model(model), library=self.name), bounds=None)


ADAPTER = KerasAdapter()
