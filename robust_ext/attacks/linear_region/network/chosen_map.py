"""Steps that are affine for the choices that other gates made, such as the product with a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.affine import AffineMap
from robust_ext.attacks.linear_region.network.gates import Gate, take_rows


class ChosenMap(Gate):
    """A function that is affine in its first inputs for the choices of each row, which the inputs after them hold.

    It has no constraints: those of the choices belong to the gates that made them.

    Args:
        function: Of all inputs, such as ``torch.where``; only the last of the inputs are chosen.
        examples: Of the first inputs, for their shapes; there may be none.
        chosen: The other inputs as they were recorded, each with as many entries for each row.
        rows: Of the batch.
    """

    name, constraints = "choice", 0

    def __init__(
        self,
        function: Callable[..., Tensor],
        examples: Sequence[Tensor],
        chosen: Sequence[Tensor],
        rows: int,
    ) -> None:
        self.rows, self._function, self._chosen = rows, function, tuple(chosen)
        # An entry of each, which holds on to no more.
        self._examples = tuple(one.detach()[:1].clone() for one in examples)
        self._map = AffineMap(lambda *inputs: function(*inputs, *self._chosen), self._examples)

    def apply(self, constraints: Tensor, *inputs: Tensor) -> Tensor:
        """See :class:`Gate`."""
        return self._map.apply(*inputs[: len(self._examples)])

    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Gate`."""
        return () if gradient is None or not self._examples else self._map.adjoint(gradient)

    def at(self, rows: int, *inputs: Tensor) -> tuple[Gate, Tensor]:
        """See :class:`Gate`."""
        gate = ChosenMap(self._function, self._examples, inputs[len(self._examples) :], rows)
        return gate, self._function(*inputs)

    def select(self, rows: Tensor) -> Gate:
        """See :class:`Gate`."""
        chosen = [take_rows(one, rows, self.rows) for one in self._chosen]
        return ChosenMap(self._function, self._examples, chosen, len(rows))

    def agrees(self, other: Gate) -> Tensor:
        """See :class:`Gate`."""
        return self._chosen[0].new_ones(self.rows, 0, dtype=torch.bool)

    def choices(self) -> Tensor:
        """See :class:`Gate`."""
        return self._chosen[0].new_zeros(self.rows, 0, dtype=torch.bool)
