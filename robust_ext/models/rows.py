"""The rows of a defense: seeds of their own, so that draws can be repeated, their groups, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import derive_seed, stream
from robust_ext.core.validation import check_integer

State: TypeAlias = Mapping[str, Tensor]
"""What a defense has found besides points: tensors of N rows, by name."""
_MOST = 2**63 - 1
Self = TypeVar("Self", bound="Drawing")


class Drawing:
    """The draws of a random module, counted since its ``seed`` was set; ``fixed`` repeats the same number."""

    seed: int | None
    draw: int
    fixed: bool

    def next_draw(self) -> int:
        """The number of this draw, which counts as made."""
        draw = self.draw
        self.draw += not self.fixed
        return draw

    @contextmanager
    def seeded(self: Self, seed: int, *, draw: int = 0, fixed: bool = False) -> Iterator[Self]:
        """Draw from a seed inside, and as before afterwards; gives the module itself.

        Args:
            seed: At least 0.
            draw: Number of the first draw.
            fixed: Whether every batch inside gets these same draws, which takes the randomness away.
        """
        before = self.seed, self.draw, self.fixed
        self.seed, self.draw = check_integer("seed", seed, minimum=0), check_integer("draw", draw, minimum=0)
        self.fixed = fixed
        try:
            yield self
        finally:
            self.seed, self.draw, self.fixed = before


class RowRNG:
    """Random numbers of N rows, counted and not consumed: the same keys give the same numbers.

    All are drawn on the CPU in float32, so the same seeds give the same numbers on every device.

    Args:
        seeds: int64 ``(N,)``, at least 0; rows of equal seeds draw equal numbers.
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


# Seeds for the defenses that a batch will meet, and a count of those that have taken theirs.
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


@dataclass(frozen=True)
class Solution:
    """The result of a defense's inner steps, for some rows.

    Attributes:
        final: The classified points, ``(N, ...)``.
        iterates: The starting point and the point after each step, ``(N, ...)`` each; may be empty unless recorded.
        state: What else the readout needs, such as controls or pseudo-labels; tensors of N rows.
    """

    final: Tensor
    iterates: tuple[Tensor, ...] = ()
    state: State = field(default_factory=dict)

    def detached(self) -> Solution:
        """The same values without their graphs."""
        state = {name: tensor.detach() for name, tensor in self.state.items()}
        return Solution(self.final.detach(), tuple(point.detach() for point in self.iterates), state)

    def select(self, rows: Tensor) -> Solution:
        """The solution of some rows, int64 ``(M,)``, in this order."""
        state = {name: tensor[rows] for name, tensor in self.state.items()}
        return Solution(self.final[rows], tuple(point[rows] for point in self.iterates), state)

    @staticmethod
    def joined(parts: Sequence[Solution], rows: int) -> Solution:
        """The first ``rows`` rows of the solutions of groups, one after another, which have equally many iterates."""
        paths = zip(*(part.iterates for part in parts), strict=True)
        return Solution(
            final=torch.cat([part.final for part in parts])[:rows],
            iterates=tuple(torch.cat(points)[:rows] for points in paths),
            state={name: torch.cat([part.state[name] for part in parts])[:rows] for name in parts[0].state},
        )


@dataclass(frozen=True)
class Trace(Solution):
    """The trace of a defense on a batch.

    Attributes:
        inputs: The batch, ``(N, ...)``.
        logits: What the defense returns, ``(N, K)``.
        seeds: Those of the rows, int64 ``(N,)``; with them :meth:`AdaptiveDefense.trace` does the same again.
    """

    inputs: Tensor = field(kw_only=True)
    logits: Tensor = field(kw_only=True)
    seeds: Tensor = field(kw_only=True)
