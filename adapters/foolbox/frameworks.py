"""The frameworks in which Foolbox's attacks compute: that of the user's Foolbox model, otherwise PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from robust_ext.adapters.bridge import Bridge
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.jax import as_jax, jax_array, jax_tensor
from robust_ext.adapters.tensorflow import as_tensorflow, tensorflow_array, tensorflow_tensor
from robust_ext.core.target import Target

# Classes whose code calls what a framework lacks, and those of Brendel and Bethge, which were not run there.
_IN_TORCH = ("PointwiseAttack", *(f"{norm}BrendelBethgeAttack" for norm in ("L0", "L1", "L2", "Linfinity")))
_UNPORTED = {"JAX": (*_IN_TORCH, "SpatialAttack"), "TensorFlow": _IN_TORCH}


class Framework:
    """PyTorch: Foolbox gets the target's module and tensors of its own."""

    def __init__(self, inside: Any = None) -> None:
        self.inside = inside

    @staticmethod
    def of(module: nn.Module, attack: type) -> Framework:
        """Return the framework of the Foolbox model inside a module, if the attack's class runs in it, else PyTorch."""
        for part in module.modules():
            if isinstance(part, Bridge) and isinstance(part.function.function, foolbox.models.Model):
                name = part.function.framework
                if attack.__name__ in _UNPORTED[name]:
                    break
                return {"JAX": _Jax, "TensorFlow": _TensorFlow}[name](part.function.function)
        return Framework()

    def array(self, x: Tensor) -> Any:
        """Return a copy of a tensor as an array of the framework."""
        return x.clone()

    def tensor(self, values: Any, like: Tensor) -> Any:
        """Return an array as a tensor on the device and in the type of ``like``; anything else unchanged."""
        return values

    def model(self, module: nn.Module, target: Target, x: Tensor) -> Any:
        """Return a Foolbox model of the framework around a module, which is called with tensors like ``x``."""
        return foolbox.PyTorchModel(module, bounds=target.bounds, device=target.device)

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Seed EagerPy's random numbers inside the block; those of PyTorch are seeded with the other generators."""
        return nullcontext()


class _Jax(Framework):
    def array(self, x: Tensor) -> Any:
        return jax_array(x)

    def tensor(self, values: Any, like: Tensor) -> Any:
        import jax

        return jax_tensor(values, like) if isinstance(values, jax.Array) else values

    def model(self, module: nn.Module, target: Target, x: Tensor) -> Any:
        function = as_jax(module, x, compiled=_own(module))
        layout = getattr(self.inside, "data_format", None)
        return foolbox.JAXModel(function, bounds=target.bounds, data_format=layout)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        import eagerpy
        import jax

        tensors: Any = eagerpy.JAXTensor
        before, tensors.key = tensors.key, jax.random.PRNGKey(seed % 2**32)
        try:
            yield
        finally:
            tensors.key = before


class _TensorFlow(Framework):
    def array(self, x: Tensor) -> Any:
        return tensorflow_array(x)

    def tensor(self, values: Any, like: Tensor) -> Any:
        import tensorflow as tf

        return tensorflow_tensor(values, like) if tf.is_tensor(values) else values

    def model(self, module: nn.Module, target: Target, x: Tensor) -> Any:
        device = "/GPU:0" if target.device.type == "cuda" else "/CPU:0"
        function = as_tensorflow(module, x, compiled=_own(module))
        return foolbox.TensorFlowModel(function, bounds=target.bounds, device=device)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        import tensorflow as tf
        from tensorflow.python.eager.context import context

        held = context()
        before = held._seed, getattr(held, "_rng", None)
        tf.random.set_seed(seed % 2**32)
        try:
            yield
        finally:
            held._seed, held._rng = before


def _own(module: nn.Module) -> Any:
    """Return the user's own model, where a module is nothing else."""
    return module.function.function if isinstance(module, Bridge) else None
