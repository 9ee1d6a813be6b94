"""Record what a network does to a batch, step by step, in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_ext.attacks.linear_region.calls import Call, tensors_in
from robust_ext.attacks.linear_region.gates import Gate
from robust_ext.attacks.linear_region.operations import Operation
from robust_ext.attacks.linear_region.region import Regions, Step, merged
from robust_ext.attacks.linear_region.rules import CONSTANT_RESULTS, QUERIES, RULES
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.target import frozen

SUPPORTED = (
    "linear layers, convolutions, batch normalisation in eval mode, average and max pooling, relu, leaky_relu, prelu, "
    "relu6, hardtanh, hardsigmoid, clamp, abs, threshold, maximum and minimum, sums, products with constants, means, "
    "padding, interpolation, concatenation and reshaping"
)


def record(network: nn.Module, points: Tensor) -> Regions:
    """The linear regions of a batch of points and the network's affine map in each.

    One forward pass is made; its choices are kept as one bool for each break and value and one int32 for each pooling
    window.

    Args:
        network: From ``(N, ...)`` to logits ``(N, K)``, piecewise affine, in eval mode; left as it was.
        points: ``(N, ...)``, float32 or float64; N may be 0.

    Returns:
        The regions, in the order of the points.

    Raises:
        InvalidArgumentError: ``points`` are not a batch of floating point values.
        ModelError: The network does something that is not piecewise affine or that cannot be followed; the text names
            it and lists what is supported.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
        >>> regions = record(network, torch.rand(4, 2))
        >>> constraints, logits = regions.forward(torch.rand(4, 2))
        >>> constraints.shape, logits.shape, regions.adjoint(constraints).shape
        (torch.Size([4, 3]), torch.Size([4, 2]), torch.Size([4, 2]))
    """
    if not isinstance(points, Tensor) or not points.is_floating_point() or points.dim() < 2:
        shown = (
            f"{points.dtype} of shape {tuple(points.shape)}" if isinstance(points, Tensor) else type(points).__name__
        )
        raise InvalidArgumentError("points", shown, "a floating point tensor (N, ...)")
    if not points.shape[0]:
        nothing = torch.zeros(0, dtype=torch.int64, device=points.device)
        return record(network, points.new_zeros(1, *points.shape[1:])).select(nothing)
    # With gradients switched on, whatever depends on the input says so, also where it could not be followed.
    with torch.inference_mode(False), torch.enable_grad(), frozen(network):
        x = points.detach().clone().requires_grad_().clone()
        recorder = Recorder(x)
        with recorder:
            logits = network(x)
        output = recorder.finished(logits)
    steps = merged(recorder.steps, output)
    return Regions(steps, shape=tuple(points.shape[1:]), dtype=points.dtype, output=output, logits=logits.detach())


@dataclass
class _Known:
    tensor: Tensor
    number: int
    version: int


class Recorder(TorchFunctionMode):
    """Watches every function a network calls and notes those that depend on the input.

    Args:
        x: The input.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.rows = x.shape[0]
        self.steps: list[Step] = []
        # Tensors are held, so that no other can get their identity.
        self._known = {id(x): _Known(x, 0, x._version)}
        self._positions: dict[int, Tensor] = {}
        self._count = 1
        self._name = "the network's result"

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out a function and note it."""
        kwargs = kwargs or {}
        name = _name_of(func)
        met = [t for t in tensors_in((args, kwargs)) if self._depends(t)]
        if not met or name in QUERIES or name in CONSTANT_RESULTS:
            return func(*args, **kwargs)
        self._name = name
        if name not in RULES:
            raise self.refusal("it is not a piecewise affine function that is known")
        if any(id(t) in self._positions for t in met):
            raise self.refusal("it uses positions of largest values")
        if kwargs.get("out") is not None:
            raise self.refusal("it writes to a tensor given as out")
        return RULES[name](self, Call(name, func, args, kwargs))

    def depends(self, value: object) -> bool:
        """Whether a value depends on the input."""
        return isinstance(value, Tensor) and self._depends(value)

    def number(self, tensor: Tensor) -> int:
        """The number of a value that depends on the input."""
        known = self._known.get(id(tensor))
        if known is None:
            raise self.refusal(
                "its input comes from a step that cannot be seen, such as a scripted or compiled part; use the plain "
                "module"
            )
        if known.version != tensor._version:
            raise self.refusal("its input was changed in place through a view")
        return known.number

    def emit(self, operation: Operation | Gate, *inputs: int) -> int:
        """Note a step, and return the number of its result."""
        number = self._count
        self._count += 1
        self.steps.append(Step(operation, inputs, number))
        return number

    def bind(self, tensor: Tensor, number: int) -> Tensor:
        """Say that a tensor holds a value, and return it."""
        if tensor.dim() == 0 or tensor.shape[0] % self.rows:
            raise self.refusal(f"its result of shape {tuple(tensor.shape)} does not have the batch first")
        if tensor.is_inference():
            raise self.refusal("it runs in inference mode, in which changes in place cannot be seen")
        self._known[id(tensor)] = _Known(tensor, number, tensor._version)
        return tensor

    def bind_positions(self, tensor: Tensor) -> Tensor:
        """Say that a tensor holds positions, which nothing may use, and return it."""
        self._positions[id(tensor)] = tensor
        return tensor

    def finished(self, logits: object) -> int:
        """The number of the network's result, after it has run."""
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != self.rows:
            shown = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelError(f"the network returned {shown}, expected logits of shape ({self.rows}, classes)")
        if not self._depends(logits):
            raise ModelError("the network's logits do not depend on its input in a way that can be followed")
        self._name = "the network's result"
        return self.number(logits)

    def refusal(self, why: str) -> ModelError:
        """The error for the function being called."""
        return ModelError(f"linear regions cannot be followed through {self._name}: {why}; supported are {SUPPORTED}")

    def _depends(self, tensor: Tensor) -> bool:
        return tensor.requires_grad or id(tensor) in self._known or id(tensor) in self._positions


def _name_of(func: Callable[..., Any]) -> str:
    """The plain name of a function: one for the function, the method, the operator and those that work in place."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        attribute = str(getattr(getattr(func, "__self__", None), "__name__", "an attribute"))
        return attribute if name == "__get__" else f"assignment to {attribute}"
    if name.startswith("__"):
        return _OPERATORS.get(name, name)
    return name.strip("_")


_OPERATORS = {
    f"__{prefix}{operator}__": plain
    for operator, plain in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "matmul": "matmul"}.items()
    for prefix in ("", "i")
}
_OPERATORS |= {"__radd__": "add", "__rmul__": "mul", "__rsub__": "rsub", "__neg__": "neg", "__abs__": "abs"}
