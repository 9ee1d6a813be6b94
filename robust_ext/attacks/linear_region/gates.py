"""Steps that choose: each row has its own choice, fixed when it was recorded, and constraints that keep it.

Every constraint is a linear function of the input that is at least 0 as long as the choice stays the same (Croce,
Rauber and Hein 2020, equations 7 and 8).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Gate(ABC):
    """A piecewise affine step with the choices of a batch.

    Attributes:
        name: The function it stands for.
        rows: Number of rows.
        constraints: Constraints of one row.
    """

    name: str
    rows: int
    constraints: int

    @abstractmethod
    def apply(self, x: Tensor, constraints: Tensor, *, offset: bool) -> Tensor:
        """The result; the values of the constraints are written to ``constraints (rows, constraints)``."""

    @abstractmethod
    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> Tensor:
        """The transpose of result and constraints together; None for a gradient of zeros."""

    @abstractmethod
    def at(self, x: Tensor, rows: int) -> tuple[Gate, Tensor]:
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
