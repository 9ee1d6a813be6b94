"""One call of a torch function, as the rules of :mod:`robust_ext.attacks.linear_region.rules` see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Call:
    """A call that is being recorded.

    Args:
        name: Plain name of the function, the same for the function, the method and the one that works in place.
        func: The function itself.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

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

    def function_of(self, tensor: Tensor) -> Callable[[Tensor], Any]:
        """The call as a function of one tensor among its arguments; it does not hold on to that tensor."""
        func = self.func
        given = replaced((self.args, self.kwargs), tensor, _HOLE)

        def function(x: Tensor) -> Any:
            args, kwargs = replaced(given, _HOLE, x)
            return func(*args, **kwargs)

        return function


_HOLE = object()


def replaced(value: Any, old: object, new: object) -> Any:
    """Nested lists, tuples and dicts with one object replaced by another."""
    if value is old:
        return new
    if isinstance(value, dict):
        return {key: replaced(item, old, new) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(item, old, new) for item in value)
    return value.detach() if isinstance(value, Tensor) else value


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def spread(value: Any, dims: int) -> tuple[int, ...]:
    """A setting for each dimension."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(int(one) for one in (values * dims if len(values) == 1 else values))
