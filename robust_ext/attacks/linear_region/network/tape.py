"""A recorder of the operations that a network applies to its input, as affine steps and gates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from robust_ext.core.errors import ModelError

if TYPE_CHECKING:
    from robust_ext.attacks.linear_region.network.affine import AffineMap
    from robust_ext.attacks.linear_region.network.gates import Gate

_SUPPORTED = (
    "linear layers, convolutions, batch normalisation in eval mode, average and max pooling, relu, leaky_relu, prelu, "
    "relu6, hardtanh, hardsigmoid, clamp, abs, threshold, maximum and minimum, sums, products with constants, means, "
    "indexing, padding, interpolation, concatenation and reshaping. robust_ext:BoundarySearch() searches any network "
    "that has gradients"
)
_COARSE = (torch.float16, torch.bfloat16)

# Functions that return something about a tensor, or a new tensor of its shape, without its values.
_WITHOUT_VALUES = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("dtype", "device", "layout", "is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse", "is_quantized", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_leaf", "requires_grad", "requires_grad_", "grad_fn"),
    *("register_hook", "__len__", "__repr__", "__format__", "__hash__"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
}
_OPERATORS = {
    f"__{prefix}{operator}__": plain
    for operator, plain in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "matmul": "matmul"}.items()
    for prefix in ("", "i")
}
_OPERATORS |= {"__radd__": "add", "__rmul__": "mul", "__rsub__": "rsub", "__neg__": "neg", "__abs__": "abs"}


@dataclass(frozen=True)
class Call:
    """A call of a torch function, with the plain name of :func:`name_of`."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by place or keyword."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[place] if len(self.args) > place else default

    @property
    def input(self) -> Any:
        """The first argument."""
        return self.get(0, "self" if "self" in self.kwargs else "input")

    def run(self) -> Any:
        """Execute the call."""
        return self.func(*self.args, **self.kwargs)


def out_of_place(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the variant of a function that leaves its input as it is."""
    name = _written(func)
    if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"):
        name = f"__{name[3:]}"
    elif name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    else:
        return func
    twin: Callable[..., Any] = getattr(Tensor, name)
    return twin


def name_of(func: Callable[..., Any]) -> str:
    """Return one name for the function, the method, the operator and their in-place variants."""
    name = _written(func)
    if name in ("__get__", "__set__"):
        attribute = str(getattr(getattr(func, "__self__", None), "__name__", "an attribute"))
        return attribute if name == "__get__" else f"assignment to {attribute}"
    return _OPERATORS.get(name, name) if name.startswith("__") else name.strip("_")


def _written(func: Callable[..., Any]) -> str:
    # Functions of exported networks end with the name of an overload.
    name = str(getattr(func, "__name__", func))
    return name.partition(".")[0] if isinstance(func, OpOverload) else name


def snapshot(tensor: Tensor) -> Tensor:
    """Return a constant that the network cannot overwrite: a parameter itself, a copy of anything else."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Step:
    """One operation of a network, on the values with these numbers; 0 is the network's input."""

    operation: AffineMap | Gate
    inputs: tuple[int, ...]
    output: int


class Tape(TorchFunctionMode):
    """A mode that records every function that depends on the input ``x``.

    ``rules`` record a function by its plain name; ``name`` is that of the current function.
    """

    def __init__(self, x: Tensor, rules: Mapping[str, Callable[[Tape, Call], Any]]) -> None:
        super().__init__()
        self._rules = rules
        self.rows = x.shape[0]
        self.steps: list[Step] = []
        self.name = ""
        # The tensor, number and version of each result. Holding the tensors keeps their identities unique.
        self._results = {id(x): (x, 0, x._version)}
        self._final: dict[int, tuple[Tensor, str]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        dependent = [t for t in tensors_in((args, kwargs)) if self.depends(t)]
        if not dependent or name in _WITHOUT_VALUES:
            return func(*args, **kwargs)
        self.name = name
        if name not in self._rules:
            raise self.refusal("it is not among the supported piecewise affine functions")
        for tensor in dependent:
            if id(tensor) in self._final:
                raise self.refusal(self._final[id(tensor)][1])
        if kwargs.get("out") is not None:
            raise self.refusal("it writes to a tensor given as out")
        return self._rules[name](self, Call(name, func, args, kwargs))

    def depends(self, value: object) -> bool:
        """Return whether a value depends on the input."""
        if not isinstance(value, Tensor):
            return False
        return value.requires_grad or id(value) in self._results or id(value) in self._final

    def number(self, tensor: Tensor) -> int:
        """Return the number of a value that depends on the input."""
        if id(tensor) not in self._results:
            hidden = "a step that cannot be seen, such as a scripted or compiled part; use the plain module"
            raise self.refusal(f"its input comes from {hidden}")
        _, number, version = self._results[id(tensor)]
        if version != tensor._version:
            raise self.refusal("its input was changed in place through a view")
        return number

    def emit(self, operation: AffineMap | Gate, *inputs: int) -> int:
        """Record a step on values with these numbers, and return the number of its result."""
        self.steps.append(Step(operation, inputs, len(self.steps) + 1))
        return len(self.steps)

    def record(self, call: Call, operation: AffineMap | Gate, *inputs: Tensor) -> Tensor:
        """Record a call as a step on these tensors, and then execute it; it may change them."""
        number = self.emit(operation, *map(self.number, inputs))
        return self.bind(call.run(), number)

    def bind(self, tensor: Tensor, number: int) -> Tensor:
        """Record that a tensor holds a value, and return it."""
        self.check_kind(tensor)
        if tensor.dim() == 0 or tensor.shape[0] != self.rows:
            raise self.refusal(f"its result of shape {tuple(tensor.shape)} does not have the batch first")
        self._results[id(tensor)] = tensor, number, tensor._version
        return tensor

    def check_kind(self, tensor: Tensor) -> None:
        """Check that a result can be followed at all."""
        if tensor.is_inference():
            raise self.refusal("it runs in inference mode, which hides changes in place")
        if tensor.dtype in _COARSE:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise self.refusal(
                f"it computes in {kind}, whose rounding is not affine; use a float32 copy of the network"
            )

    def make_final(self, tensor: Tensor, why: str) -> Tensor:
        """Refuse any function of a tensor, with the reason."""
        self._final[id(tensor)] = tensor, why
        return tensor

    def number_of_logits(self, logits: object) -> int:
        """Return the number of the network's result."""
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != self.rows:
            shown = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelError(f"the network returned {shown}, expected logits of shape ({self.rows}, classes)")
        if not self.depends(logits):
            raise ModelError("the network's logits do not depend on its input in a way that can be followed")
        self.name = "the network's result"
        if id(logits) in self._final and id(logits) not in self._results:
            raise self.refusal(self._final[id(logits)][1])
        return self.number(logits)

    def refusal(self, why: str) -> ModelError:
        """Return the error for the current function."""
        return ModelError(f"linear regions cannot be followed through {self.name}: {why}; supported are {_SUPPORTED}")
