"""Purifiers: defenses that change the input step by step before it is classified."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_solution import Solution
from robust_ext.models.row_rng import RowRNG
from robust_ext.models.vjp import attach_checkpoint, wants_gradient


class Purifier(AdaptiveDefense):
    """A defense of ``steps`` equal steps on the input; a subclass implements :meth:`step` alone.

    The gradient of the whole flows through every step, which holds the graphs of all of them. With
    ``checkpoint=True`` no more than the points are held, and one step's graph at a time while the gradient is taken:
    each step is then done twice, and its parameters get no gradients.

    Example:
        >>> class Halved(Purifier):
        ...     def step(self, point, *, x, number, state, rng):
        ...         return point / 2
        >>> defense = Halved(torch.nn.Identity(), steps=3)
        >>> defense(torch.tensor([[8.0, 16.0]]))
        tensor([[1., 2.]])
        >>> [float(point[0, 0]) for point in defense.trace(torch.tensor([[8.0, 16.0]])).iterates]
        [8.0, 4.0, 2.0, 1.0]
    """

    @abstractmethod
    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        """The next point.

        It must not change its arguments, and give the same when it is called again with the same. Gradients of losses
        at the point come from :func:`robust_ext.models.vjp.row_gradient`.

        Args:
            point: ``(N, ...)``.
            x: The input itself, ``(N, ...)``, for projections around it.
            number: Of the step, from 0; also a key for draws.
            state: As :meth:`start` made it.
            rng: The rows' random numbers.
        """

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The starting point ``(N, ...)``, and what all steps and the readout share: tensors of N rows, by name."""
        return x, {}

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Do the steps, see :meth:`AdaptiveDefense.solve`."""
        point, state = self.start(x, rng)
        iterates = [point]
        for number in range(self.steps):
            point = self._next(point, x, number, state, rng)
            if not record:
                iterates.clear()
            iterates.append(point)
        return Solution(point, tuple(iterates), state)

    def _next(self, point: Tensor, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        if not (self.checkpoint and wants_gradient(point, x, *state.values())):
            return self.step(point, x=x, number=number, state=state, rng=rng)

        def again(point: Tensor, x: Tensor, *values: Tensor) -> Tensor:
            with torch.set_grad_enabled(torch.is_grad_enabled() or self.needs_gradients):
                held = dict(zip(state, values, strict=True))
                return self.step(point, x=x, number=number, state=held, rng=rng)

        return attach_checkpoint(again, point, x, *state.values())
