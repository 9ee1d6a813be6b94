"""TensorFlow functions as torch modules, by ``tf.GradientTape``. Importing this imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from robust_ext.adapters.bridge import ForeignFunction, bridged, noted
from robust_ext.adapters.host import required
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.models.vjp import VJP
from robust_ext.registry.base import AdaptedModel, Adapter, comes_from


class TensorFlowFunction(ForeignFunction):
    """A TensorFlow function.

    Args:
        function: From tensors ``(N, ...)`` to tensors ``(N, ...)``.
        graph: Whether it is compiled by ``tf.function``.
    """

    framework = "TensorFlow"

    def __init__(self, function: Callable[[Any], Any], *, graph: bool = False) -> None:
        self.function = function
        self.graph = graph

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.function, self.graph)

    @cached_property
    def _run(self) -> Callable[[Any], Any]:
        import tensorflow as tf

        def called(x: Any) -> Any:
            return self.array_of(self.function(x))

        compiled: Callable[[Any], Any] = tf.function(called, reduce_retracing=True) if self.graph else called
        return compiled

    def value(self, x: Tensor) -> Tensor:
        """See the base."""
        return tensorflow_tensor(self._run(tensorflow_array(x)), x)

    def with_pullback(self, x: Tensor) -> tuple[Tensor, VJP]:
        """See the base."""
        import tensorflow as tf

        given = tensorflow_array(x)
        # Several backward passes may follow.
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(given)
            out = self._run(given)

        def pulled(cotangent: Tensor) -> list[Tensor | None]:
            gradient = tape.gradient(
                out,
                given,
                output_gradients=tf.cast(tensorflow_array(cotangent), out.dtype),
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return [tensorflow_tensor(tf.convert_to_tensor(gradient), x)]

        return tensorflow_tensor(out, x), pulled

    def weights(self) -> list[Any]:
        """See the base."""
        return [one.numpy() for one in getattr(self.function, "variables", ())]


def _again(function: Any, graph: bool) -> TensorFlowFunction:
    return TensorFlowFunction(function, graph=graph)


def tensorflow_array(x: Tensor) -> Any:
    """Return a TensorFlow tensor of the values; a copy, because torch may change its own in place."""
    import tensorflow as tf

    copied = x.detach().clone(memory_format=torch.contiguous_format)
    if tf.config.list_physical_devices("GPU") or not x.is_cuda:
        return tf.experimental.dlpack.from_dlpack(to_dlpack(copied))
    return tf.convert_to_tensor(copied.cpu().numpy())


def tensorflow_tensor(values: Any, like: Tensor) -> Tensor:
    """Return a tensor of the values, on the device and in the precision of ``like``."""
    return torch.from_numpy(values.numpy().copy()).to(like)


def as_tensorflow(
    module: nn.Module, like: Tensor, *, compiled: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    """Return a torch module as a function of TensorFlow tensors, whose gradients are the module's.

    Args:
        module: From tensors ``(N, ...)`` to tensors.
        like: A tensor of the device and type that the module takes.
        compiled: The same in TensorFlow, called in place of the module in graphs, where there are no values.
    """
    import tensorflow as tf

    def forward(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        given = tensorflow_tensor(x, like).requires_grad_()
        with torch.enable_grad():
            out = module(given)

        def pulled(cotangent: Any) -> Any:
            (gradient,) = torch.autograd.grad(out, given, tensorflow_tensor(cotangent, out), retain_graph=True)
            return tensorflow_array(gradient)

        return tensorflow_array(out), pulled

    differentiable = tf.custom_gradient(forward)

    def called(x: Any) -> Any:
        if tf.executing_eagerly():
            return differentiable(x)
        if compiled is None:
            raise ModelError(
                "the attack compiles its target, which works only where the target is the TensorFlow model itself; "
                "call it outside of tf.function"
            )
        return compiled(x)

    return called


def tensorflow_model(
    function: Callable[[Any], Any], *, features: Callable[[Any], Any] | None = None, channels_first: bool = False
) -> nn.Module:
    """Return a TensorFlow function as a module of eval mode, whose gradients are those of ``tf.GradientTape``.

    Args:
        function: A ``tf.Module``, ``tf.function`` or other callable from float32 inputs ``(N, ...)`` to logits
            ``(N, K)``. It runs as it is: decorate it by ``tf.function`` to compile it.
        features: A function from inputs to features ``(N, F)``; ``function`` is then the head, from features to
            logits. The binarization test reads these features; without them, the logits.
        channels_first: Whether inputs are ``(N, C, H, W)``, where the function takes ``(N, H, W, C)``. By default
            inputs are what the function takes.

    Raises:
        InvalidArgumentError: A function cannot be called.
        MissingDependencyError: TensorFlow is not installed.
    """
    required("tensorflow", "tensorflow", title="TensorFlow", install='"robust-ext[tensorflow]"')
    for name, one in (("function", function), ("features", features)):
        if one is not None and not callable(one):
            raise InvalidArgumentError(name, type(one).__name__, "a TensorFlow function of a batch of inputs")
    first = None if features is None else TensorFlowFunction(features)
    return bridged(TensorFlowFunction(function), first, channels_first=channels_first)


class TensorFlowAdapter(Adapter):
    """``tf.Module`` and ``tf.function`` objects; plain functions enter by :func:`tensorflow_model`."""

    name = "tensorflow"

    def adapt_model(self, model: object) -> AdaptedModel | None:
        """Wrap an object of TensorFlow that can be called; Keras models have an adapter of their own."""
        if not comes_from(model, "tensorflow") or comes_from(model, "keras") or not callable(model):
            return None
        return AdaptedModel(module=noted(tensorflow_model(model), library=self.name), bounds=None)


ADAPTER = TensorFlowAdapter()
