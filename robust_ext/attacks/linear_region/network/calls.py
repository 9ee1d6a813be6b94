"""Calls of torch functions as they are recorded: their plain names, their arguments, and functions made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload

_OPERATORS = {
    f"__{prefix}{operator}__": plain
    for operator, plain in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "matmul": "matmul"}.items()
    for prefix in ("", "i")
}
_OPERATORS |= {"__radd__": "add", "__rmul__": "mul", "__rsub__": "rsub", "__neg__": "neg", "__abs__": "abs"}
_OPERATORS |= {"__gt__": "gt", "__ge__": "ge", "__lt__": "lt", "__le__": "le"}


@dataclass(frozen=True)
class Call:
    """A call of a torch function that is being recorded, with the plain name of :func:`name_of`."""

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
        return self.get(0, "self" if isinstance(self.func, OpOverload) and "self" in self.kwargs else "input")

    def run(self) -> Any:
        """Carry out the call."""
        return self.func(*self.args, **self.kwargs)

    @property
    def out_of_place(self) -> Callable[..., Any]:
        """The function, or its twin that leaves its arguments as they are."""
        name = _written(self.func)
        if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"):
            name = f"__{name[3:]}"
        elif name.endswith("_") and not name.endswith("__"):
            name = name[:-1]
        else:
            return self.func
        twin: Callable[..., Any] = getattr(Tensor, name)
        return twin

    def function_of(self, tensors: Sequence[Tensor], constants: Callable[[Tensor], Any]) -> Callable[..., Any]:
        """The call as a function of some tensors among its arguments, with ``constants`` of each of the others.

        It does not hold on to any of these tensors. The function ``constants`` returns what takes the place of one, or
        a :class:`PerRow` of it.
        """
        places = {id(tensor): Hole(place) for place, tensor in enumerate(tensors)}
        func, given = self.out_of_place, _mapped((self.args, self.kwargs), lambda t: places.get(id(t)) or constants(t))

        def function(*inputs: Tensor) -> Any:
            args, kwargs = _filled(given, inputs)
            return func(*args, **kwargs)

        return function


@dataclass(frozen=True)
class Hole:
    """Where an input of a function goes, by its number."""

    place: int


@dataclass(frozen=True)
class PerRow:
    """A constant ``(1, ...)`` that is repeated for each row of the inputs."""

    value: Tensor


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Nested lists, tuples and dicts with a function of each tensor in its place."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    return type(value)(_mapped(item, function) for item in value) if type(value) in (list, tuple) else value


def _filled(value: Any, inputs: Sequence[Tensor]) -> Any:
    """Nested lists, tuples and dicts with the inputs in their holes."""
    if isinstance(value, Hole):
        return inputs[value.place]
    if isinstance(value, PerRow):
        return value.value.expand(inputs[0].shape[0], *value.value.shape[1:])
    if isinstance(value, dict):
        return {key: _filled(item, inputs) for key, item in value.items()}
    return type(value)(_filled(item, inputs) for item in value) if type(value) in (list, tuple) else value


def name_of(func: Callable[..., Any]) -> str:
    """The plain name of a function: one for the function, the method, the operator and those that work in place."""
    name = _written(func)
    if name in ("__get__", "__set__"):
        attribute = str(getattr(getattr(func, "__self__", None), "__name__", "an attribute"))
        return attribute if name == "__get__" else f"assignment to {attribute}"
    if name.startswith("__"):
        return _OPERATORS.get(name, name)
    return name.strip("_")


def _written(func: Callable[..., Any]) -> str:
    """The name that a function has; of an overload of an exported program, that of its function."""
    name = str(getattr(func, "__name__", func))
    return name.partition(".")[0] if isinstance(func, OpOverload) else name


def snapshot(tensor: Tensor) -> Tensor:
    """A constant that the network cannot write to afterwards: a parameter itself, a copy of anything else."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, slice):
        yield from tensors_in([value.start, value.stop, value.step])


def per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    """A setting for each dimension."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(int(one) for one in (values * dims if len(values) == 1 else values))
