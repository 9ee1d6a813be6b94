"""A user's classifier as evaluations run it: from float32 inputs to float32 logits, found out by one forward pass."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from robust_ext.core.devices import coarsest
from robust_ext.core.errors import ModelError, warn
from robust_ext.core.foreign import text_of, without_values
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.forms import InPrecision, ambient_autocast, weights_type
from robust_ext.models.outputs import reduced
from robust_ext.models.wrapping import Wrapped

# Enough inputs to tell two modules apart, few enough to cost nothing.
PROBES = 4


def as_classifier(module: nn.Module, inputs: Tensor, labels: Tensor | None = None) -> nn.Module:
    """A module in its own precision, reduced to its logits; the module itself where it is float32 to ``(N, K)``.

    Args:
        module: From inputs to anything that holds logits, see :mod:`robust_ext.models.outputs`.
        inputs: float32 ``(N, ...)``, on the module's device; a few are used, more where the labels decide.
        labels: int64 ``(N,)``, which tell what is not clear without them.

    Raises:
        ModelError: It is not clear what of its output the logits are, or it is a model of another task.
    """
    few = inputs[:PROBES]
    if inputs.dim() == 4 and getattr(module, "channels_last", False):
        warn(
            "model: it takes images (N, H, W, C), and inputs stay so; attacks that place windows or patches (Square) "
            "read the first dimension as the channels. With channels_first=True where the model enters, as in "
            "robust_ext.adapters.keras.keras_model(model, channels_first=True), inputs are (N, C, H, W)"
        )
    if lazy := [name for name, one in (*module.named_parameters(), *module.named_buffers()) if is_lazy(one)]:
        raise ModelError(
            f"model: {', '.join(lazy[:3])} of its lazy modules hold no values yet; call the model on a batch once, or "
            "load its weights"
        )
    # On a CUDA device their recurrent layers need another way to have a backward pass in eval mode.
    if any(isinstance(part, nn.RNNBase) and not part.training for part in module.modules()) and _on_cuda(module):
        module = _WithoutCudnn(module)
    if isinstance(module, (InPrecision, AdaptiveDefense)) or _has_no_values(module, few):
        return module
    own, ambient = weights_type(module), ambient_autocast(inputs.device.type)
    runner = module if ambient is None else InPrecision(module, precision=ambient, autocast=ambient)
    dtype, (output, seen, error) = None, _probe(runner, few)
    if error is not None and own not in (None, torch.float32):
        dtype, (output, seen, error) = own, _probe(runner, few.to(own))
    wrapped = module
    if isinstance(output, Tensor) and (odd := without_values(output)) is not None:
        raise ModelError(
            f"model: returned a tensor {odd}, expected a plain, dense one of logits ({len(few)}, K): wrap the model in "
            f"a module that returns {_dense_way(output)}"
        )
    if error is None:

        def run(batch: Tensor) -> object:
            found, _, raised = _probe(runner, batch if dtype is None else batch.to(dtype))
            if raised is not None:
                words = f"raised {type(raised).__name__} on inputs of shape {tuple(batch.shape)}: {text_of(raised)}"
                raise ModelError(f"model: {words}") from raised
            return found

        wrapped, logits = reduced(module, output, run, inputs, labels, rows=len(few))
        seen.append(logits.dtype)
    precision = coarsest([kind for kind in (*seen, dtype, ambient) if kind is not None and kind.is_floating_point])
    if ambient is None and dtype is None and precision in (torch.float32, torch.float64):
        return wrapped
    return InPrecision(wrapped, precision=precision, dtype=dtype, autocast=ambient)


def _dense_way(output: Tensor) -> str:
    """Return the advice for a plain tensor from a network's output."""
    if output.is_meta:
        return "logits with values"
    if output.is_nested:
        return "output.to_padded_tensor(0)"
    return "output.to_dense()" if output.layout != torch.strided else "output.float()"


def parts_in_precision(pair: tuple[nn.Module, nn.Module], inputs: Tensor) -> tuple[nn.Module, nn.Module]:
    """A pair ``(features, readout)`` from float32 to float32, each as it is where it takes float32."""
    ambient = ambient_autocast(inputs.device.type)
    if ambient is not None:
        first, second = (InPrecision(part, precision=ambient, autocast=ambient) for part in pair)
        return first, second
    types = {weights_type(part) for part in pair} - {None, torch.float32}
    if not types or any(_has_no_values(part, inputs) for part in pair):
        return pair
    found: list[nn.Module] = []
    x: Any = inputs
    for part in pair:
        own = weights_type(part)
        output, _, error = _probe(part, x)
        if error is not None and own is not None:
            part = InPrecision(part, precision=own, dtype=own)
            output = _probe(part, x)[0]
        found.append(part)
        x = output if isinstance(output, Tensor) else x
    return found[0], found[1]


class _WithoutCudnn(Wrapped):
    """A network with recurrent layers, which cuDNN runs without a backward pass in eval mode."""

    def forward(self, x: Tensor) -> Any:
        """Whatever the network returns."""
        with torch.backends.cudnn.flags(enabled=False):
            return self.module(x)


def _on_cuda(module: nn.Module) -> bool:
    return any(weight.is_cuda for weight in module.parameters())


def _has_no_values(module: nn.Module, inputs: Tensor) -> bool:
    return any(tensor.is_meta for tensor in (inputs, *module.parameters(), *module.buffers()))


def _probe(module: nn.Module, inputs: Tensor) -> tuple[object, list[torch.dtype], BaseException | None]:
    """Return a module's output, the types between its parts, and its exception; restores the module."""
    seen: set[torch.dtype] = set()

    def note(_module: nn.Module, _args: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            seen.add(output.dtype)

    with ExitStack() as stack:
        for block in (frozen(module, attributes=True), torch.no_grad(), seeded_globals(0)):
            stack.enter_context(block)
        for part in module.modules():
            if not isinstance(part, torch.jit.ScriptModule):
                stack.enter_context(part.register_forward_hook(note))
        try:
            # A copy: a module that works in place must not change what is its caller's.
            return module(inputs.clone()), list(seen), None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return None, [], error
