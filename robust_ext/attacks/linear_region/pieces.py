"""Functions of one variable that are affine between breaks, see :mod:`robust_ext.attacks.linear_region.gates`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.gates import Gate

Constant = Tensor | float


class Pieces(Gate):
    """A function of one variable that is affine between breaks, applied to every value.

    A row of constraints belongs to each break and value: its distance from the break, on the side it is on.

    Args:
        name: The function it stands for.
        breaks: Where pieces meet, increasing; numbers or tensors that broadcast against one entry.
        slopes: One more than there are breaks.
        intercepts: As many as slopes.
        sides: For each break, whether a value lies above it; bool ``(entries, *tail)``.
        rows: Number of rows.
        values: Values of one row.
        dtype: Of the values.
        last: Whether channels are the innermost in memory. That is then the order of the constraints, so that none
            has to be moved.
    """

    def __init__(
        self,
        name: str,
        *,
        breaks: tuple[Constant, ...],
        slopes: tuple[Constant, ...],
        intercepts: tuple[Constant, ...],
        sides: tuple[Tensor, ...],
        rows: int,
        values: int,
        dtype: torch.dtype,
        last: bool,
    ) -> None:
        self.name = name
        self.breaks, self.slopes, self.intercepts = breaks, slopes, intercepts
        self.sides = sides
        self.rows = rows
        self.dtype = dtype
        self.last = last
        self.values = values
        self.constraints = len(breaks) * values

    @cached_property
    def _factor(self) -> Tensor:
        plain = len(self.slopes) == 2 and all(isinstance(slope, float) for slope in self.slopes)
        return self.sides[0].to(self.dtype) if plain and self.slopes == (0.0, 1.0) else self._chosen(self.slopes)

    @cached_property
    def _summand(self) -> Tensor | None:
        if all(isinstance(value, float) and value == 0 for value in self.intercepts):
            return None
        return self._chosen(self.intercepts)

    @cached_property
    def _signs(self) -> list[Tensor]:
        return [self._flat(side).to(self.dtype).mul_(2).sub_(1) for side in self.sides]

    def _chosen(self, constants: tuple[Constant, ...]) -> Tensor:
        first, *others = (torch.as_tensor(one, dtype=self.dtype, device=self.sides[0].device) for one in constants)
        out = torch.where(self.sides[0], others[0], first)
        for side, constant in zip(self.sides[1:], others[1:], strict=True):
            out = torch.where(side, constant, out)
        return out

    def apply(self, x: Tensor, constraints: Tensor, *, offset: bool) -> Tensor:
        """See :class:`Gate`."""
        for part, sign, point in zip(self._parts(constraints), self._signs, self.breaks, strict=True):
            centred = x - point if offset and (isinstance(point, Tensor) or point != 0) else x
            torch.mul(self._flat(centred), sign, out=part)
        return self._result(x, offset=offset)

    def _result(self, x: Tensor, *, offset: bool) -> Tensor:
        out = x * self._factor
        if offset and self._summand is not None:
            out += self._summand
        return out

    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> Tensor:
        """See :class:`Gate`."""
        parts = self._parts(multipliers)
        total = parts[0] * self._signs[0]
        for part, sign in zip(parts[1:], self._signs[1:], strict=True):
            total.addcmul_(part, sign)
        shaped = self._shaped(total)
        return shaped if gradient is None else torch.addcmul(shaped, gradient, self._factor)

    def at(self, x: Tensor, rows: int) -> tuple[Gate, Tensor]:
        """See :class:`Gate`."""
        gate = self._with(tuple(x > point for point in self.breaks), rows)
        return gate, gate._result(x, offset=True)

    def select(self, rows: Tensor) -> Gate:
        """See :class:`Gate`."""
        return self._with(tuple(_take_rows(side, rows, self.rows) for side in self.sides), len(rows))

    def _with(self, sides: tuple[Tensor, ...], rows: int) -> Pieces:
        return Pieces(
            self.name,
            breaks=self.breaks,
            slopes=self.slopes,
            intercepts=self.intercepts,
            sides=sides,
            rows=rows,
            values=self.values,
            dtype=self.dtype,
            last=self.last,
        )

    def agrees(self, other: Gate) -> Tensor:
        """See :class:`Gate`."""
        assert isinstance(other, Pieces)
        pairs = zip(self.sides, other.sides, strict=True)
        return torch.cat([self._flat(mine == theirs) for mine, theirs in pairs], 1)

    def choices(self) -> Tensor:
        """See :class:`Gate`."""
        return torch.cat([side.reshape(self.rows, self.values) for side in self.sides], 1)

    def _parts(self, constraints: Tensor) -> Sequence[Tensor]:
        return [constraints.narrow(1, i * self.values, self.values) for i in range(len(self.breaks))]

    def _flat(self, x: Tensor) -> Tensor:
        return (x.movedim(1, -1) if self.last else x).reshape(self.rows, self.values)

    def _shaped(self, flat: Tensor) -> Tensor:
        shape = self.sides[0].shape
        if not self.last:
            return flat.view(shape)
        return flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def _take_rows(entries: Tensor, rows: Tensor, count: int) -> Tensor:
    """The entries of some rows of ``count``, each of which owns as many consecutive ones."""
    if entries.shape[0] == count:
        return entries[rows]
    tail = entries.shape[1:]
    return entries.view(count, -1, *tail)[rows].view(-1, *tail)
