"""Piecewise affine steps: each row has its own choice, and constraints that hold as long as the choice is the same.

Every constraint is a linear function of the input that is at least 0 inside the region (Croce, Rauber and Hein 2019,
equations 7 and 8).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

Constant = Tensor | float


class Gate(ABC):
    """A piecewise affine function of ``x (rows, ...)`` with the choices of a batch; ``constraints`` counts a row's."""

    name: str
    rows: int
    constraints: int

    @abstractmethod
    def apply(self, constraints: Tensor, x: Tensor) -> Tensor:
        """Return the result, and write the constraints to ``constraints (rows, constraints)``."""

    @abstractmethod
    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> Tensor:
        """Return the transpose of result and constraints together; a gradient of None stands for zeros."""

    @abstractmethod
    def at(self, x: Tensor) -> tuple[Self, Tensor]:
        """Return the gate with the choices of another input, of any number of rows, and the result for it."""

    @abstractmethod
    def select(self, rows: Tensor) -> Self:
        """Return the gate of some rows, int64 indices."""

    @abstractmethod
    def choices(self) -> Tensor:
        """Return the choices of each row, ``(rows, n)`` of a bool or integer dtype."""

    def agrees(self, other: Gate) -> Tensor:
        """Return which constraints mean the same with the choices of the other, bool ``(rows, constraints)``."""
        return self.choices() == other.choices()


@dataclass(eq=False)
class PiecewiseActivation(Gate):
    """A function of one variable that is affine between breakpoints, applied to every value.

    Each breakpoint and value has a constraint: its distance from the breakpoint, on its own side. Breakpoints increase;
    they, the slopes and intercepts of the pieces between them are numbers or tensors that broadcast against one row.
    ``active`` holds for each breakpoint whether a value lies above it, bool ``(rows, ...)``.
    """

    name: str
    breakpoints: tuple[Constant, ...]
    slopes: tuple[Constant, ...]
    intercepts: tuple[Constant, ...]
    active: tuple[Tensor, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.rows = len(self.active[0])
        self._values = self.active[0].shape[1:].numel()
        self.constraints = len(self.breakpoints) * self._values

    @cached_property
    def _factor(self) -> Tensor:
        return self.active[0].to(self.dtype) if _are(self.slopes, 0.0, 1.0) else self._chosen(self.slopes)

    @cached_property
    def _summand(self) -> Tensor | None:
        return None if _are(self.intercepts, *[0.0] * len(self.intercepts)) else self._chosen(self.intercepts)

    @cached_property
    def _signs(self) -> list[Tensor]:
        return [self._flat(side).to(self.dtype).mul_(2).sub_(1) for side in self.active]

    def _chosen(self, constants: tuple[Constant, ...]) -> Tensor:
        out, *others = (torch.as_tensor(one, dtype=self.dtype, device=self.active[0].device) for one in constants)
        for side, constant in zip(self.active, others, strict=True):
            out = torch.where(side, constant, out)
        return out

    def apply(self, constraints: Tensor, x: Tensor) -> Tensor:
        """See :class:`Gate`."""
        for part, sign, point in zip(self._parts(constraints), self._signs, self.breakpoints, strict=True):
            centred = x - point if isinstance(point, Tensor) or point != 0 else x
            torch.mul(self._flat(centred), sign, out=part)
        return self._result(x)

    def _result(self, x: Tensor) -> Tensor:
        out = x * self._factor
        if self._summand is not None:
            out += self._summand
        return out

    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> Tensor:
        """See :class:`Gate`."""
        parts = self._parts(multipliers)
        total = parts[0] * self._signs[0]
        for part, sign in zip(parts[1:], self._signs[1:], strict=True):
            total.addcmul_(part, sign)
        total = total.view(self.active[0].shape)
        return total if gradient is None else torch.addcmul(total, gradient, self._factor)

    def at(self, x: Tensor) -> tuple[Self, Tensor]:
        """See :class:`Gate`."""
        gate = replace(self, active=tuple(x > point for point in self.breakpoints))
        return gate, gate._result(x)

    def select(self, rows: Tensor) -> Self:
        """See :class:`Gate`."""
        return replace(self, active=tuple(side[rows] for side in self.active))

    def choices(self) -> Tensor:
        """See :class:`Gate`."""
        return torch.cat([self._flat(side) for side in self.active], 1)

    def _parts(self, constraints: Tensor) -> Sequence[Tensor]:
        return [constraints.narrow(1, i * self._values, self._values) for i in range(len(self.active))]

    def _flat(self, x: Tensor) -> Tensor:
        return x.reshape(self.rows, self._values)


def _are(constants: tuple[Constant, ...], *numbers: float) -> bool:
    return all(isinstance(one, float) for one in constants) and constants == numbers


@dataclass(eq=False)
class MaxGate(Gate):
    """The largest of several values, as in max pooling.

    Each window and each value in it has a constraint: the largest value minus that value, which is 0 for the largest
    itself. Windows at the rim, which hold fewer values, repeat one.

    Attributes:
        windows: Positions in a channel of ``size``, int64 ``(values, windows)``.
        argmax: The position of each largest value, int32 ``(rows, channels, windows)``.
        before: The shape of one row's input.
        after: The shape of one row's result.
        places: The places in ``windows`` that hold each position, ``(places, size)``, padded with one past the end.
    """

    name: str
    windows: Tensor
    argmax: Tensor
    size: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    places: Tensor

    @classmethod
    def make(cls, name: str, x: Tensor, out: Tensor, windows: Tensor, argmax: Tensor) -> MaxGate:
        """Return the gate of an input, with channels behind the rows, and a result."""
        size = x.numel() // (len(x) * argmax.shape[1]) if argmax.numel() else 0
        flat = windows.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=size)
        which = torch.arange(max(1, int(counts.max())), device=flat.device)[:, None]
        places = (counts.cumsum(0) - counts + which).clamp(max=flat.numel() - 1)
        places = torch.where(which < counts, order[places], flat.numel())
        return cls(name, windows, argmax.to(torch.int32), size, tuple(x.shape[1:]), tuple(out.shape[1:]), places)

    def __post_init__(self) -> None:
        self.rows, self._channels = self.argmax.shape[:2]
        self.constraints = self._channels * self.windows.numel()

    @cached_property
    def _indices(self) -> Tensor:
        return self.argmax.flatten(0, 1).long()

    def apply(self, constraints: Tensor, x: Tensor) -> Tensor:
        """See :class:`Gate`."""
        flat = x.reshape(self.rows * self._channels, self.size)
        largest = flat.gather(1, self._indices).view(self.rows, self._channels, 1, self.windows.shape[1])
        shape = (self.rows, self._channels, *self.windows.shape)
        others = flat.index_select(1, self.windows.flatten()).view(shape)
        torch.sub(largest, others, out=constraints.view(shape))
        return largest.view(self.rows, *self.after)

    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> Tensor:
        """See :class:`Gate`."""
        lines = self.rows * self._channels
        flat = multipliers.reshape(lines, self.windows.numel())
        largest = flat.view(lines, *self.windows.shape).sum(1)
        if gradient is not None:
            largest += gradient.reshape(largest.shape)
        if self.places.shape[0] > 1 or self.places.numel() != self.windows.numel():
            # One more column of zeros, for positions that lie in fewer windows than others.
            flat = F.pad(flat, (0, 1))
        spread = flat.index_select(1, self.places.flatten())
        out = spread.view(lines, *self.places.shape).sum(1).neg_() if self.places.shape[0] > 1 else spread.neg_()
        return out.scatter_add_(1, self._indices, largest).view(self.rows, *self.before)

    def at(self, x: Tensor) -> tuple[Self, Tensor]:
        """See :class:`Gate`."""
        flat = x.reshape(len(x) * self._channels, self.size)
        values = flat.index_select(1, self.windows.flatten()).view(flat.shape[0], *self.windows.shape)
        largest, place = values.max(1)
        columns = torch.arange(self.windows.shape[1], device=x.device)
        argmax = self.windows[place, columns].view(len(x), self._channels, self.windows.shape[1])
        return replace(self, argmax=argmax.to(torch.int32)), largest.view(len(x), *self.after)

    def select(self, rows: Tensor) -> Self:
        """See :class:`Gate`."""
        return replace(self, argmax=self.argmax[rows])

    def choices(self) -> Tensor:
        """See :class:`Gate`."""
        return self.argmax.flatten(1)

    def agrees(self, other: Gate) -> Tensor:
        """See :class:`Gate`."""
        same = super().agrees(other).view(self.rows, self._channels, 1, -1)
        return same.expand(-1, -1, self.windows.shape[0], -1).reshape(self.rows, self.constraints)


def products(axes: list[list[list[int]]], sizes: Sequence[int]) -> Tensor:
    """Return positions in each window ``(windows, values)`` from those along each axis; short ones repeat one."""
    whole = torch.zeros(1, 1, dtype=torch.int64)
    for windows, size in zip(axes, sizes, strict=True):
        width = max(map(len, windows), default=0)
        axis = torch.tensor([window + window[-1:] * (width - len(window)) for window in windows], dtype=torch.int64)
        grown = whole[:, None, :, None] * size + axis[None, :, None, :]
        whole = grown.reshape(grown.shape[0] * grown.shape[1], -1)
    return whole
