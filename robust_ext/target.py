"""Targets: what an attack may see and query, with its forward and backward passes counted.

A target holds one ``nn.Module`` that maps a batch of inputs in the threat model's bounds to logits. Foolbox models
and ART classifiers become one through the adapters, which keep their preprocessing inside that module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robust_ext.errors import InvalidArgumentError, ModelError


@dataclass
class PassCounter:
    """Counts of rows sent through a network.

    Attributes:
        forward: Rows (single samples) that went forward.
        backward: Rows through which a gradient came back.
    """

    forward: int = 0
    backward: int = 0

    def snapshot(self) -> PassCounter:
        """The counts as they are now."""
        return PassCounter(self.forward, self.backward)

    def since(self, earlier: PassCounter) -> PassCounter:
        """What was counted since ``earlier``."""
        return PassCounter(self.forward - earlier.forward, self.backward - earlier.backward)


class Counted(nn.Module):
    """A module that counts the rows through it; values and gradients are those of the module.

    Args:
        module: Any module from a batch to a batch.
        counter: Where the rows are counted.
    """

    def __init__(self, module: nn.Module, counter: PassCounter) -> None:
        super().__init__()
        self.module = module
        self.counter = counter
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """Count and pass on ``(N, ...)``."""
        rows = x.shape[0]
        self.counter.forward += rows
        out: Tensor = self.module(x)
        if out.requires_grad:
            if out is x:
                # A hook on the caller's own tensor would stay on it, and count again at every later pass.
                out = out.view_as(out)
            out.register_hook(lambda _: self._count_backward(rows))  # type: ignore[no-untyped-call]
        return out

    def _count_backward(self, rows: int) -> None:
        self.counter.backward += rows


@dataclass(frozen=True, kw_only=True)
class Target:
    """A classifier as attacks meet it.

    Args:
        module: From inputs ``(N, *input_shape)`` in ``bounds`` to logits ``(N, classes)``; in eval mode.
        bounds: Lowest and highest valid input value.
        classes: Number of columns of the logits, at least 2.
        input_shape: Shape of one input, without the batch.
        device: Where inputs must lie.
        counter: Rows sent through ``module``, kept by the module itself.
    """

    module: nn.Module
    bounds: tuple[float, float]
    classes: int
    input_shape: tuple[int, ...]
    device: torch.device
    counter: PassCounter = field(default_factory=PassCounter)


def module_device(module: nn.Module) -> torch.device:
    """Device of the first parameter or buffer; the CPU for a module that has none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def check_classifier(module: nn.Module, inputs: Tensor) -> Tensor:
    """Run a classifier on a few inputs and return its logits ``(n, K)``; raise where it is no such thing.

    Args:
        module: The classifier, on the device of ``inputs``.
        inputs: float32 ``(n, ...)``, at least one row.

    Raises:
        InvalidArgumentError: ``module`` is not an ``nn.Module``.
        ModelError: It is in train mode, raises on such inputs, returns no ``(n, K >= 2)`` finite float tensor, or
            returns probabilities.
    """
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError("model", type(module).__name__, "a torch.nn.Module from inputs to logits")
    training = [
        name or type(part).__name__ for name, part in module.named_modules() if part.training and _behaves(part)
    ]
    if module.training or training:
        raise ModelError(
            f"model: {', '.join(training[:3]) or type(module).__name__} is in train mode, where outputs may depend "
            "on the batch or on chance; call model.eval() first"
        )
    try:
        with torch.no_grad():
            logits = module(inputs)
    except Exception as error:
        raise ModelError(
            f"model: raised {type(error).__name__} on inputs of shape {tuple(inputs.shape)} and dtype float32: {error}"
        ) from error
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        shown = f"dtype {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(f"model: returned {shown}, expected a floating point tensor of logits")
    if logits.dim() != 2 or logits.shape[0] != inputs.shape[0] or logits.shape[1] < 2:
        raise ModelError(
            f"model: returned shape {tuple(logits.shape)} for {inputs.shape[0]} inputs, expected logits of shape "
            f"({inputs.shape[0]}, K) with at least two classes; turn one column z into the two columns [0, z]"
        )
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("model: returned NaN or infinite logits on clean inputs")
    sums_to_one = bool(((logits.double().sum(1) - 1).abs() < 1e-4).all())
    if sums_to_one and bool((logits >= 0).all()) and bool((logits <= 1).all()):
        raise ModelError(
            "model: returns probabilities (rows in [0, 1] that sum to one), expected logits; leave out the softmax"
        )
    return logits.detach()


def _behaves(part: nn.Module) -> bool:
    """Whether the train mode of this very module changes what it computes."""
    return isinstance(part, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)) or (
        isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats
    )


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Attack a module without leaving a trace on it.

    Inside, no parameter asks for a gradient (attacks need those of the inputs only, which saves part of each backward
    pass). On leaving, ``requires_grad``, ``grad``, buffers and train flags are as they were, whatever the attack did:
    an attack that switches batch normalisation into train mode would otherwise change the network it is judged on.
    """
    parameters = [(p, p.requires_grad, p.grad) for p in module.parameters()]
    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    flags = [(part, part.training) for part in module.modules()]
    for parameter, _, _ in parameters:
        parameter.requires_grad_(False)
        # Kept aside, where nothing can be added to it in place.
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, asked, gradient in parameters:
            parameter.requires_grad_(asked)
            parameter.grad = gradient
        with torch.no_grad():
            for part, name, buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
                setattr(part, name, buffer)
        for part, training in flags:
            part.training = training
