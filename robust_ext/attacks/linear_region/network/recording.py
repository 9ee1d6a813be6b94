"""Record what a network does to a batch, step by step, in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_ext.attacks.linear_region.network import affine_rules, gate_rules, max_gates
from robust_ext.attacks.linear_region.network.regions import Regions, merge_scales
from robust_ext.attacks.linear_region.network.tape import Call, Tape, tensors_in
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.target import frozen

# Functions that return something about a tensor without its values.
_QUERIES = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("dtype", "device", "layout", "is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse", "is_quantized", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_leaf", "requires_grad", "requires_grad_", "grad_fn"),
    *("register_hook", "__len__", "__repr__", "__format__", "__hash__"),
}
# Functions that take no more than the shape of their input.
_CONSTANT_RESULTS = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
}
_RULES = {**affine_rules.RULES, **gate_rules.RULES, **max_gates.RULES}


def record(network: nn.Module, points: Tensor) -> Regions:
    """The linear regions of a batch of points and the network's affine map in each.

    One forward pass is made; its choices are kept as one bool for each breakpoint and value and one int32 for each
    pooling window.

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
    # With gradients switched on, whatever depends on the input requires them, also where it could not be followed.
    with torch.inference_mode(False), torch.enable_grad(), frozen(network):
        x = points.detach().clone().requires_grad_().clone()
        tape = Tape(x)
        with _Recorder(tape):
            logits = network(x)
        output = _number_of(tape, logits)
    steps = merge_scales(tape.steps, output)
    return Regions(steps, shape=tuple(points.shape[1:]), dtype=points.dtype, output=output, logits=logits.detach())


class _Recorder(TorchFunctionMode):
    """Writes every function that a network calls, and that depends on the input, to a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, tape = _name_of(func), self._tape
        dependent = [t for t in tensors_in((args, kwargs)) if tape.depends(t)]
        if not dependent or name in _QUERIES or name in _CONSTANT_RESULTS:
            return func(*args, **kwargs)
        tape.name = name
        if name not in _RULES:
            raise tape.refusal("it is not a piecewise affine function that is known")
        if any(tape.holds_positions(t) for t in dependent):
            raise tape.refusal("it uses positions of largest values")
        if kwargs.get("out") is not None:
            raise tape.refusal("it writes to a tensor given as out")
        return _RULES[name](tape, Call(name, func, args, kwargs))


def _number_of(tape: Tape, logits: object) -> int:
    """The number of the network's result."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != tape.rows:
        shown = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(f"the network returned {shown}, expected logits of shape ({tape.rows}, classes)")
    if not tape.depends(logits):
        raise ModelError("the network's logits do not depend on its input in a way that can be followed")
    tape.name = "the network's result"
    return tape.number(logits)


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
