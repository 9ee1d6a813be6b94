"""The order of values as a gate, and how sorting becomes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.calls import Call, snapshot
from robust_ext.attacks.linear_region.network.chosen_map import ChosenMap
from robust_ext.attacks.linear_region.network.gates import Gate, take_rows
from robust_ext.attacks.linear_region.network.tape import Tape


class OrderGate(Gate):
    """Positions of the largest or smallest values along a dimension, in their order: int64, constant in each region.

    A row of constraints belongs to each neighbours in that order, and to each value that is not among the first: how
    much it is behind the last of these.

    Args:
        name: Of the function.
        positions_of: The positions ``(entries, ..., k, ...)`` of values ``(entries, ..., n, ...)``.
        places: Positions of all values, those of the function first, ``(entries, ..., n, ...)``.
        kept: How many of them the function returns, ``k``.
        dim: The dimension, counted from the start.
        largest: Whether the order begins with the largest.
        rows: Of the batch.
    """

    def __init__(
        self,
        name: str,
        positions_of: Callable[[Tensor], Tensor],
        places: Tensor,
        *,
        kept: int,
        dim: int,
        largest: bool,
        rows: int,
    ) -> None:
        self.name, self.rows, self.places = name, rows, places
        self._positions_of, self._kept, self._dim, self._largest = positions_of, kept, dim, largest
        self._count = places.shape[dim]
        self.constraints = places.numel() // (rows * max(1, self._count)) * (self._count - 1) if rows else 0
        # Places in the order of those that are ahead and behind.
        ahead = [min(place, kept - 1) for place in range(self._count - 1)]
        self._ahead = torch.tensor(ahead, dtype=torch.int64, device=places.device)
        self._sign = 1.0 if largest else -1.0

    def apply(self, constraints: Tensor, *inputs: Tensor) -> Tensor:
        """See :class:`Gate`."""
        ordered = inputs[0].gather(self._dim, self.places)
        ahead = ordered.index_select(self._dim, self._ahead)
        behind = ordered.narrow(self._dim, 1, self._count - 1)
        constraints.copy_(((ahead - behind) * self._sign).reshape(self.rows, self.constraints))
        return self._first()

    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Gate`."""
        shape = list(self.places.shape)
        shape[self._dim] -= 1
        parts = multipliers.reshape(shape) * self._sign
        ordered = parts.new_zeros(self.places.shape).index_add_(self._dim, self._ahead, parts)
        ordered.narrow(self._dim, 1, self._count - 1).sub_(parts)
        return (torch.zeros_like(ordered).scatter_(self._dim, self.places, ordered),)

    def at(self, rows: int, *inputs: Tensor) -> tuple[Gate, Tensor]:
        """See :class:`Gate`."""
        places = all_places(self._positions_of(inputs[0]), inputs[0], self._dim)
        gate = self._with(places, rows)
        return gate, gate._first()

    def select(self, rows: Tensor) -> Gate:
        """See :class:`Gate`."""
        return self._with(take_rows(self.places, rows, self.rows), len(rows))

    def agrees(self, other: Gate) -> Tensor:
        """See :class:`Gate`."""
        assert isinstance(other, OrderGate)
        same = self.places == other.places
        both = same.index_select(self._dim, self._ahead) & same.narrow(self._dim, 1, self._count - 1)
        return both.reshape(self.rows, self.constraints)

    def choices(self) -> Tensor:
        """See :class:`Gate`."""
        first = self._first()
        return first.reshape(self.rows, first.numel() // max(1, self.rows))

    def _first(self) -> Tensor:
        return self.places.narrow(self._dim, 0, self._kept)

    def _with(self, places: Tensor, rows: int) -> OrderGate:
        kept, dim, largest = self._kept, self._dim, self._largest
        return OrderGate(self.name, self._positions_of, places, kept=kept, dim=dim, largest=largest, rows=rows)


def all_places(first: Tensor, values: Tensor, dim: int) -> Tensor:
    """Positions of all values along a dimension: those that come first, and the others in their own order."""
    taken = torch.zeros_like(values, dtype=torch.uint8).scatter_(dim, first, 1)
    order = taken.argsort(dim=dim, stable=True)
    return torch.cat([first, order.narrow(dim, 0, values.shape[dim] - first.shape[dim])], dim)


def _ordered(tape: Tape, call: Call) -> Any:
    """Sorting, and the first of what is sorted."""
    x, first = call.input, call.name == "topk"
    if first:
        dim, largest = call.get(2, "dim", -1), call.get(3, "largest", True)
    else:
        dim, largest = call.get(1, "dim", -1), call.get(2, "descending", False)
    dim %= x.dim()
    if dim == 0:
        raise tape.refusal("it works along the batch dimension")
    number, values = tape.affine(x), snapshot(x)
    out = call.run()
    positions = out if isinstance(out, Tensor) else out[1]
    if not first or call.get(4, "sorted", True):
        pick = call.function_of([x], snapshot)
    else:
        raise tape.refusal("it returns values in no order; leave out sorted=False")

    def positions_of(points: Tensor) -> Tensor:
        given = pick(points)
        found: Tensor = given if isinstance(given, Tensor) else given[1]
        return found

    places = all_places(positions, values, dim)
    kept = positions.shape[dim]
    gate = OrderGate(call.name, positions_of, places, kept=kept, dim=dim, largest=largest, rows=tape.rows)
    chosen = tape.emit(gate, number, chosen=True)
    tape.bind(positions, chosen)
    if not isinstance(out, Tensor):
        gathered = ChosenMap(lambda one, place: one.gather(dim, place), [values], [positions], tape.rows)
        tape.bind(out[0], tape.emit(gathered, number, chosen))
    return out


RULES: dict[str, Callable[[Tape, Call], Any]] = dict.fromkeys(("sort", "topk", "argsort"), _ordered)
