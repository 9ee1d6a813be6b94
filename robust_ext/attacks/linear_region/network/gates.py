"""Steps that choose: each row has its own choice, fixed when it was recorded, and constraints that keep it.

Every constraint is a linear function of the input that is at least 0 as long as the choice stays the same (Croce,
Rauber and Hein 2019, equations 7 and 8).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

Constant = Tensor | float


class Gate(ABC):
    """A piecewise affine step, named by its function, with the choices of a batch; ``constraints`` are of one row."""

    name: str
    rows: int
    constraints: int

    @abstractmethod
    def apply(self, constraints: Tensor, *inputs: Tensor) -> Tensor:
        """The result; the values of the constraints are written to ``constraints (rows, constraints)``."""

    @abstractmethod
    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> tuple[Tensor, ...]:
        """The transpose of result and constraints together, for the first inputs; None for a gradient of zeros."""

    @abstractmethod
    def at(self, rows: int, *inputs: Tensor) -> tuple[Gate, Tensor]:
        """The gate with the choices that other inputs make, of any number of rows, and the result for them."""

    @abstractmethod
    def select(self, rows: Tensor) -> Gate:
        """The gate of some of the rows, int64 indices."""

    @abstractmethod
    def agrees(self, other: Gate) -> Tensor:
        """Which constraints mean the same as with the choices of the other, bool ``(rows, constraints)``."""

    @abstractmethod
    def choices(self) -> Tensor:
        """The choices of each row, ``(rows, n)`` of a bool or integer dtype."""


@dataclass(eq=False)
class PiecewiseActivation(Gate):
    """A function of one variable that is affine between breakpoints, applied to every value.

    A row of constraints belongs to each breakpoint and value: its distance from the breakpoint, on the side it is on.
    Breakpoints increase; they, the slopes and intercepts of the pieces between them are numbers or tensors that
    broadcast against one entry. ``active`` holds for each breakpoint whether a value lies above it, bool
    ``(entries, *tail)``. With channels innermost in memory, that is also the order of the constraints, so that none
    has to be moved.
    """

    name: str
    breakpoints: tuple[Constant, ...]
    slopes: tuple[Constant, ...]
    intercepts: tuple[Constant, ...]
    active: tuple[Tensor, ...]
    rows: int
    values: int
    dtype: torch.dtype
    channels_last: bool

    def __post_init__(self) -> None:
        self.constraints = len(self.breakpoints) * self.values

    @cached_property
    def _factor(self) -> Tensor:
        relu = all(isinstance(slope, float) for slope in self.slopes) and self.slopes == (0.0, 1.0)
        return self.active[0].to(self.dtype) if relu else self._chosen(self.slopes)

    @cached_property
    def _summand(self) -> Tensor | None:
        none = all(isinstance(value, float) and value == 0 for value in self.intercepts)
        return None if none else self._chosen(self.intercepts)

    @cached_property
    def _signs(self) -> list[Tensor]:
        return [self._flat(side).to(self.dtype).mul_(2).sub_(1) for side in self.active]

    def _chosen(self, constants: tuple[Constant, ...]) -> Tensor:
        out, *others = (torch.as_tensor(one, dtype=self.dtype, device=self.active[0].device) for one in constants)
        for side, constant in zip(self.active, others, strict=True):
            out = torch.where(side, constant, out)
        return out

    def apply(self, constraints: Tensor, *inputs: Tensor) -> Tensor:
        """See :class:`Gate`."""
        (x,) = inputs
        for part, sign, point in zip(self._parts(constraints), self._signs, self.breakpoints, strict=True):
            centred = x - point if isinstance(point, Tensor) or point != 0 else x
            torch.mul(self._flat(centred), sign, out=part)
        return self._result(x)

    def _result(self, x: Tensor) -> Tensor:
        out = x * self._factor
        if self._summand is not None:
            out += self._summand
        return out

    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Gate`."""
        parts = self._parts(multipliers)
        total = parts[0] * self._signs[0]
        for part, sign in zip(parts[1:], self._signs[1:], strict=True):
            total.addcmul_(part, sign)
        count, *tail = self.active[0].shape
        last = self.channels_last
        total = total.view(count, *tail[1:], tail[0]).movedim(-1, 1) if last else total.view(count, *tail)
        return (total if gradient is None else torch.addcmul(total, gradient, self._factor),)

    def at(self, rows: int, *inputs: Tensor) -> tuple[Gate, Tensor]:
        """See :class:`Gate`."""
        (x,) = inputs
        gate = replace(self, active=tuple(x > point for point in self.breakpoints), rows=rows)
        return gate, gate._result(x)

    def select(self, rows: Tensor) -> Gate:
        """See :class:`Gate`."""
        active = tuple(take_rows(side, rows, self.rows) for side in self.active)
        return replace(self, active=active, rows=len(rows))

    def agrees(self, other: Gate) -> Tensor:
        """See :class:`Gate`."""
        assert isinstance(other, PiecewiseActivation)
        pairs = zip(self.active, other.active, strict=True)
        return torch.cat([self._flat(mine == theirs) for mine, theirs in pairs], 1)

    def choices(self) -> Tensor:
        """See :class:`Gate`."""
        return torch.cat([side.reshape(self.rows, self.values) for side in self.active], 1)

    def _parts(self, constraints: Tensor) -> Sequence[Tensor]:
        return [constraints.narrow(1, i * self.values, self.values) for i in range(len(self.active))]

    def _flat(self, x: Tensor) -> Tensor:
        return (x.movedim(1, -1) if self.channels_last else x).reshape(self.rows, self.values)


class Comparison(PiecewiseActivation):
    """Whether each value lies above 0: bool, and so constant in each region."""

    def _result(self, x: Tensor) -> Tensor:
        return self.active[0]


def take_rows(entries: Tensor, rows: Tensor, count: int) -> Tensor:
    """The entries of some rows of ``count``, each of which holds as many consecutive ones."""
    if entries.shape[0] == count:
        return entries[rows]
    tail = entries.shape[1:]
    return entries.view(count, -1, *tail)[rows].view(-1, *tail)
