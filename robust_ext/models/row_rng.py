"""The random numbers of a defense: each row's come from a seed of its own, so that they can be drawn once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import derive_seed, stream

_MOST = 2**63 - 1


class RowRNG:
    """Random numbers of N rows, counted and not consumed: the same keys give the same numbers.

    All are drawn on the CPU in float32, so the same seeds give the same numbers on every device.

    Args:
        seeds: int64 ``(N,)``, at least 0; rows of equal seeds draw equal numbers.

    Example:
        >>> rng = RowRNG(torch.tensor([5, 6, 5]))
        >>> noise = rng.normal(torch.zeros(3, 2), "noise", 0)
        >>> bool((noise[0] == noise[2]).all()), bool((noise[0] == noise[1]).any())
        (True, False)
    """

    def __init__(self, seeds: Tensor) -> None:
        self.seeds: list[int] = seeds.tolist()

    def generator(self, row: int, *keys: int | str) -> torch.Generator:
        """A CPU generator of a row's own, for draws of other kinds. A group draws together from its row 0."""
        return stream(self.seeds[row], *keys)

    def uniform(self, like: Tensor, *keys: int | str, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers in ``[low, high]`` of the shape, type and device of ``like`` ``(N, ...)``."""
        return self._fill(like, torch.rand, keys) * (high - low) + low

    def normal(self, like: Tensor, *keys: int | str) -> Tensor:
        """Standard normal numbers of the shape, type and device of ``like`` ``(N, ...)``."""
        return self._fill(like, torch.randn, keys)

    def integers(self, below: int, *keys: int | str) -> Tensor:
        """One integer of ``0 .. below - 1`` a row, int64 ``(N,)`` on the CPU."""
        drawn = [int(torch.randint(below, (), generator=stream(seed, *keys))) for seed in self.seeds]
        return torch.tensor(drawn, dtype=torch.int64)

    def _fill(self, like: Tensor, draw: Callable[..., Tensor], keys: tuple[int | str, ...]) -> Tensor:
        if len(like) != len(self.seeds):
            raise InvalidArgumentError("like", f"{len(like)} rows", f"{len(self.seeds)} rows, one for each seed")
        if not self.seeds:
            return torch.empty_like(like)
        return torch.stack([draw(like.shape[1:], generator=stream(seed, *keys)) for seed in self.seeds]).to(like)


def seeds_of(rows: int, generator: torch.Generator | None = None) -> Tensor:
    """One seed a row, int64 ``(rows,)``, by a CPU generator or torch's global one; the same for more rows."""
    return torch.randint(_MOST, (rows,), generator=generator)


# Seeds for whatever defenses a batch will meet, and what counts those that have taken theirs.
_given: ContextVar[tuple[Tensor, Iterator[int]] | None] = ContextVar("robust_ext_row_seeds", default=None)


@contextmanager
def row_seeds(seeds: Tensor) -> Iterator[None]:
    """Give every defense called inside its seeds, int64 ``(N,)``, however deep in other modules it lies.

    Entering again with the same seeds repeats the draws, also where several defenses are called in a row.
    """
    token = _given.set((seeds, count()))
    try:
        yield
    finally:
        _given.reset(token)


def given_seeds(rows: int) -> Tensor | None:
    """The seeds of :func:`row_seeds` for a defense of ``rows`` rows; None outside of it, ModelError for other rows."""
    given = _given.get()
    if given is None:
        return None
    seeds, taken = given
    if len(seeds) != rows:
        raise ModelError(
            f"test-time defense: got a batch of {rows} rows where seeds were given for {len(seeds)}; modules "
            "around a random defense must pass on the batch row for row"
        )
    if (number := next(taken)) == 0:
        return seeds
    return torch.tensor([derive_seed(seed, "call", number) for seed in seeds.tolist()], dtype=torch.int64)
