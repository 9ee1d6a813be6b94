"""The cost of work: rows that go through a network, forward and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Cost:
    """Rows that are sent through a network.

    Args:
        forward: Rows that go forward, at most.
        backward: Rows that a gradient comes back through, at most.
        unknown: What else is run, and of which nothing is known before: names of attacks.

    Example:
        >>> Cost(3, 2) * 10 + Cost(1, 0, ("mine",))
        Cost(forward=31, backward=20, unknown=('mine',))
    """

    forward: float = 0
    backward: float = 0
    unknown: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        unknown = tuple(dict.fromkeys((*self.unknown, *other.unknown)))
        return Cost(self.forward + other.forward, self.backward + other.backward, unknown)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.forward * times, self.backward * times, self.unknown)


Costs = dict[tuple[str, str | None], Cost]
"""By phase, and of attacks by name."""


class Spent(NamedTuple):
    """The cost of something: forward rows, backward rows and seconds.

    In JSON it is a list of the three.

    Example:
        >>> Spent.total([Spent(3, 2, 0.5), [1, 0, 0.25]])
        Spent(forward=4, backward=2, seconds=0.75)
    """

    forward: int = 0
    backward: int = 0
    seconds: float = 0.0

    @classmethod
    def total(cls, parts: Iterable[Sequence[float]]) -> Spent:
        """Return the sum of several costs."""
        forward, backward, seconds = (sum(column) for column in zip(*parts, (0, 0, 0.0), strict=True))
        return cls(int(forward), int(backward), float(seconds))

    @property
    def passes(self) -> dict[str, int]:
        """The rows by name."""
        return {"forward": self.forward, "backward": self.backward}
