"""Records what a network does: its steps, and which tensors hold their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_ext.attacks.linear_region.network.affine import AffineMap
from robust_ext.attacks.linear_region.network.gates import Gate
from robust_ext.core.errors import ModelError

_SUPPORTED = (
    "linear layers, convolutions, batch normalisation in eval mode, average and max pooling, relu, leaky_relu, prelu, "
    "relu6, hardtanh, hardsigmoid, clamp, abs, threshold, maximum and minimum, sums, products with constants, means, "
    "padding, interpolation, concatenation and reshaping"
)

# Functions that return something about a tensor, or another one of its shape, without its values.
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
class Step:
    """One operation of a network, on the values of these numbers; 0 is the network's input, gates have one input."""

    operation: AffineMap | Gate
    inputs: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Call:
    """A call of a torch function that is being recorded, with the plain name of :func:`_name_of`."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or keyword."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[place] if len(self.args) > place else default

    @property
    def input(self) -> Any:
        """The first argument."""
        return self.get(0, "input")

    def run(self) -> Any:
        """Carry out the call."""
        return self.func(*self.args, **self.kwargs)

    @property
    def out_of_place(self) -> Callable[..., Any]:
        """The function, or its twin that leaves its arguments as they are."""
        name = str(getattr(self.func, "__name__", ""))
        if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"):
            name = f"__{name[3:]}"
        elif name.endswith("_") and not name.endswith("__"):
            name = name[:-1]
        else:
            return self.func
        twin: Callable[..., Any] = getattr(Tensor, name)
        return twin

    def function_of(self, tensor: Tensor) -> Callable[[Tensor], Any]:
        """The call as a function of one tensor among its arguments; it does not hold on to that tensor."""
        func, given = self.out_of_place, _replaced((self.args, self.kwargs), tensor, _HOLE)

        def function(x: Tensor) -> Any:
            args, kwargs = _replaced(given, _HOLE, x)
            return func(*args, **kwargs)

        return function


class Tape(TorchFunctionMode):
    """Records every function that a network calls and that depends on the input ``x``, while it is entered.

    ``rules`` record a function, by its plain name; ``name`` is that of the function being called.
    """

    def __init__(self, x: Tensor, rules: Mapping[str, Callable[[Tape, Call], Any]]) -> None:
        super().__init__()
        self._rules = rules
        self.rows = x.shape[0]
        self.steps: list[Step] = []
        self.name = ""
        # Number and version of each result. Tensors are held, so that no other can get their identity.
        self._results = {id(x): (x, 0, x._version)}
        self._positions: dict[int, Tensor] = {}
        self._count = 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, _name_of(func)
        dependent = [t for t in tensors_in((args, kwargs)) if self.depends(t)]
        if not dependent or name in _WITHOUT_VALUES:
            return func(*args, **kwargs)
        self.name = name
        if name not in self._rules:
            raise self.refusal("it is not among the piecewise affine functions that can be followed")
        if any(id(t) in self._positions for t in dependent):
            raise self.refusal("it uses positions of largest values")
        if kwargs.get("out") is not None:
            raise self.refusal("it writes to a tensor given as out")
        return self._rules[name](self, Call(name, func, args, kwargs))

    def depends(self, value: object) -> bool:
        """Whether a value depends on the input."""
        if not isinstance(value, Tensor):
            return False
        return value.requires_grad or id(value) in self._results or id(value) in self._positions

    def number(self, tensor: Tensor) -> int:
        """The number of a value that depends on the input."""
        if id(tensor) not in self._results:
            hidden = "a step that cannot be seen, such as a scripted or compiled part; use the plain module"
            raise self.refusal(f"its input comes from {hidden}")
        _, number, version = self._results[id(tensor)]
        if version != tensor._version:
            raise self.refusal("its input was changed in place through a view")
        return number

    def emit(self, operation: AffineMap | Gate, *inputs: int) -> int:
        """Record a step on values of these numbers, and return the number of its result."""
        number = self._count
        self._count += 1
        self.steps.append(Step(operation, inputs, number))
        return number

    def emit_function(self, function: Callable[..., Tensor], *inputs: Tensor) -> int:
        """Record an affine function of tensors that depend on the input, and return the number of its result."""
        return self.emit(AffineMap(function, inputs), *map(self.number, inputs))

    def record(self, call: Call, operation: AffineMap | Gate, *inputs: Tensor) -> Tensor:
        """Record a call as a step on tensors that depend on the input, and then carry it out: it may change them."""
        number = self.emit(operation, *map(self.number, inputs))
        return self.bind(call.run(), number)

    def bind(self, tensor: Tensor, number: int) -> Tensor:
        """Record that a tensor holds a value, and return it."""
        if tensor.dim() == 0 or tensor.shape[0] % self.rows:
            raise self.refusal(f"its result of shape {tuple(tensor.shape)} does not have the batch first")
        if tensor.is_inference():
            raise self.refusal("it runs in inference mode, in which changes in place cannot be seen")
        self._results[id(tensor)] = tensor, number, tensor._version
        return tensor

    def bind_positions(self, tensor: Tensor) -> None:
        """Record that a tensor holds positions, which no function may use."""
        self._positions[id(tensor)] = tensor

    def number_of_logits(self, logits: object) -> int:
        """The number of the network's result."""
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != self.rows:
            shown = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelError(f"the network returned {shown}, expected logits of shape ({self.rows}, classes)")
        if not self.depends(logits):
            raise ModelError("the network's logits do not depend on its input in a way that can be followed")
        self.name = "the network's result"
        return self.number(logits)

    def refusal(self, why: str) -> ModelError:
        """The error for the function being called."""
        return ModelError(f"linear regions cannot be followed through {self.name}: {why}; supported are {_SUPPORTED}")


def _name_of(func: Callable[..., Any]) -> str:
    """The plain name of a function: one for the function, the method, the operator and those that work in place."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        attribute = str(getattr(getattr(func, "__self__", None), "__name__", "an attribute"))
        return attribute if name == "__get__" else f"assignment to {attribute}"
    if name.startswith("__"):
        return _OPERATORS.get(name, name)
    return name.strip("_")


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    """A setting for each dimension."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(int(one) for one in (values * dims if len(values) == 1 else values))


_HOLE = object()


def _replaced(value: Any, old: object, new: object) -> Any:
    """Nested lists, tuples and dicts with one object replaced by another; what the network may write to is copied."""
    if value is old:
        return new
    if isinstance(value, dict):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, old, new) for item in value)
    if old is _HOLE or not isinstance(value, Tensor):
        return value
    return value.detach() if isinstance(value, nn.Parameter) else value.detach().clone()
