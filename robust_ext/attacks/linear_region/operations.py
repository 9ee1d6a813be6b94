"""Affine steps of a network with explicit transposes, to be applied again without the network.

A step maps tensors whose first dimension holds the rows of a batch (or a fixed number of entries for each row, such
as tokens) and never mixes rows, so it can be applied to any number of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F


class Operation(ABC):
    """An affine map of one or more tensors, the same for every row."""

    @abstractmethod
    def apply(self, inputs: Sequence[Tensor], *, offset: bool) -> Tensor:
        """The result, without its constant part where ``offset`` is False."""

    @abstractmethod
    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """The transpose of the linear part, one result for each input."""


@dataclass(frozen=True)
class Reshape(Operation):
    """A view: every row keeps its values in their order.

    Args:
        inside: Shape of the recorded input.
        outside: Shape of the recorded result.
        rows: Rows of the recorded batch.
    """

    inside: tuple[int, ...]
    outside: tuple[int, ...]
    rows: int

    def apply(self, inputs: Sequence[Tensor], *, offset: bool) -> Tensor:
        """See :class:`Operation`."""
        return self._shaped(inputs[0], self.inside, self.outside)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Operation`."""
        return (self._shaped(gradient, self.outside, self.inside),)

    def _shaped(self, x: Tensor, came: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
        rows = x.shape[0] // (came[0] // self.rows)
        return x.reshape(rows * (wanted[0] // self.rows), *wanted[1:])


@dataclass(frozen=True)
class Affine(Operation):
    """``scale * x + shift`` with constants that broadcast to one entry.

    Args:
        scale: A number or tensor; None for 1.
        shift: A number or tensor; None for 0.
    """

    scale: Tensor | float | None = None
    shift: Tensor | float | None = None

    def apply(self, inputs: Sequence[Tensor], *, offset: bool) -> Tensor:
        """See :class:`Operation`."""
        (x,) = inputs
        shift = self.shift if offset else None
        if isinstance(self.scale, Tensor) and isinstance(shift, Tensor):
            return torch.addcmul(shift, x, self.scale)
        if self.scale is not None:
            x = x * self.scale
        return x if shift is None else x + shift

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Operation`."""
        return (gradient if self.scale is None else gradient * self.scale,)


@dataclass(frozen=True)
class Sum(Operation):
    """``a + weight * b`` of two results that depend on the input.

    Args:
        weight: Factor of the second.
        tails: Shapes of the two without their first dimension, which may broadcast.
    """

    weight: float
    tails: tuple[tuple[int, ...], tuple[int, ...]]

    def apply(self, inputs: Sequence[Tensor], *, offset: bool) -> Tensor:
        """See :class:`Operation`."""
        return torch.add(inputs[0], inputs[1], alpha=self.weight)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Operation`."""
        second = gradient if self.weight == 1 else gradient * self.weight
        return _summed(gradient, self.tails[0]), _summed(second, self.tails[1])


@dataclass(frozen=True)
class Pad(Operation):
    """Padding with a constant; negative widths crop.

    Args:
        widths: As for ``torch.nn.functional.pad``.
        value: What is put there.
    """

    widths: tuple[int, ...]
    value: float

    def apply(self, inputs: Sequence[Tensor], *, offset: bool) -> Tensor:
        """See :class:`Operation`."""
        return F.pad(inputs[0], self.widths, value=self.value if offset else 0.0)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Operation`."""
        return (F.pad(gradient, tuple(-width for width in self.widths)),)


@dataclass(frozen=True)
class Concatenate(Operation):
    """Parts side by side, some of which may be constants.

    Args:
        parts: A constant of one row, or None where the next input goes.
        sizes: Width of each part.
        dim: The dimension, above 0.
    """

    parts: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    dim: int

    def apply(self, inputs: Sequence[Tensor], *, offset: bool) -> Tensor:
        """See :class:`Operation`."""
        following = iter(inputs)
        count = inputs[0].shape[0]
        pieces = []
        for part in self.parts:
            if part is None:
                pieces.append(next(following))
            else:
                pieces.append((part if offset else torch.zeros_like(part)).expand(count, *part.shape[1:]))
        return torch.cat(pieces, self.dim)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Operation`."""
        pieces = torch.split_with_sizes(gradient, self.sizes, self.dim)
        return tuple(piece for piece, part in zip(pieces, self.parts, strict=True) if part is None)


@dataclass(frozen=True)
class Linear(Operation):
    """``x W' + b`` over the last dimension.

    Args:
        weight: ``(out, in)``.
        bias: ``(out,)`` or None.
    """

    weight: Tensor
    bias: Tensor | None

    def apply(self, inputs: Sequence[Tensor], *, offset: bool) -> Tensor:
        """See :class:`Operation`."""
        return F.linear(inputs[0], self.weight, self.bias if offset else None)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Operation`."""
        return (gradient @ self.weight,)


@dataclass(frozen=True)
class Linearity(Operation):
    """Any linear function without a constant part; its transpose is taken by automatic differentiation.

    The graph of a linear function does not depend on where it was recorded, so one is kept and used again for every
    product with as many rows.

    Args:
        function: The function.
        inside: Shape of the recorded input.
        example: An empty tensor of the input's dtype and device.
    """

    function: Callable[[Tensor], Tensor]
    inside: tuple[int, ...]
    example: Tensor
    _graphs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def apply(self, inputs: Sequence[Tensor], *, offset: bool) -> Tensor:
        """See :class:`Operation`."""
        return self.function(inputs[0])

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Operation`."""
        count = gradient.shape[0]
        if not count:
            return (gradient.new_zeros(0, *self.inside[1:]),)
        if count not in self._graphs:
            self._graphs.clear()
            with torch.enable_grad():
                point = self.example.new_zeros(count, *self.inside[1:]).requires_grad_()
                self._graphs[count] = point, self.function(point)
        point, result = self._graphs[count]
        return torch.autograd.grad(result, point, gradient, retain_graph=True)


def _summed(gradient: Tensor, tail: tuple[int, ...]) -> Tensor:
    """Add up what a result was broadcast to."""
    return gradient if gradient.shape[1:] == tail else gradient.sum_to_size(gradient.shape[0], *tail)
