"""Shared parts of defenses: sign steps in a box around the input and inside the bounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.modules import given, module_class
from robust_ext.core.settings import setting
from robust_ext.models.adaptive import Purifier
from robust_ext.models.rows import RowRNG, State
from robust_ext.models.vjp import row_gradient


@module_class
class SignPurifier(Purifier):
    """A purifier whose steps go by ``step_size`` along the sign of a gradient, back into an linf ball and the bounds.

    A subclass implements :meth:`loss`, which steps raise, or lower where ``sign`` is -1. Radius and step size follow
    the width of the bounds; ``clip``: whether points are kept in these.
    """

    needs_gradients = True
    stretched = ("radius", "step_size")

    bounds: tuple[float, float] = given("Of the inputs.", default=(0.0, 1.0))
    checkpoint: bool = setting(default=False, help="See :class:`~robust_ext.models.adaptive.Purifier`.")
    radius: float | None = setting(
        default=None, help="Radius of the linf ball around the input, in units of [0, 1]; None for no ball.", minimum=0
    )
    step_size: float | None = setting(default=None, help="Step size in units of [0, 1].", above=0)

    clip = True
    sign = 1

    @abstractmethod
    def loss(self, point: Tensor, **held: Any) -> Tensor:
        """Return what steps change, ``(N,)``, at points ``(N, ...)``; ``held`` is as for :meth:`Purifier.step`."""

    def direction(self, point: Tensor, **held: Any) -> Tensor:
        """Return the direction of points ``(N, ...)``, to be multiplied by the step size."""
        return self.sign * row_gradient(lambda leaf: self.loss(leaf, **held), point).sign()

    def step(self, point: Tensor, *, x: Tensor, number: int, state: State, rng: RowRNG) -> Tensor:
        """Take one step, and project it into ball and bounds."""
        size: Any = self.step_size
        moved = point + size * self.direction(point, number=number, state=state, rng=rng)
        return keep_in(moved, x=x, radius=self.radius, bounds=self.bounds if self.clip else None)


def layer_names(names: Any) -> tuple[str, ...]:
    """Return names of layers from a list or a text with commas; InvalidArgumentError for anything else."""
    found = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(name, str) for name in found):
        raise InvalidArgumentError("layers", names, "names of layers, in a list or with commas between them")
    return tuple(found)


def keep_in(point: Tensor, *, x: Tensor, radius: float | None, bounds: Sequence[float] | None) -> Tensor:
    """Project points ``(N, ...)`` into an linf ball around ``x`` ``(N, ...)`` and into the bounds; None skips either.

    A point that lies in both comes back to the last bit. Gradients flow to ``point`` where it was free to move, and to
    ``x`` where the ball held it.
    """
    if radius is not None:
        point = point.maximum(x - radius).minimum(x + radius)
    return point if bounds is None else point.clamp(bounds[0], bounds[1])


def random_start(defense: Any, x: Tensor, rng: RowRNG, *, clip: bool = True) -> Tensor:
    """Draw points ``(N, ...)`` uniformly from the ball around ``x``; ``clip`` them to the bounds."""
    point = x + rng.uniform(x, "start", low=-defense.radius, high=defense.radius)
    return keep_in(point, x=x, radius=defense.radius, bounds=defense.bounds if clip else None)


def over_rows(values: Tensor, like: Tensor) -> Tensor:
    """Reshape values ``(N,)`` to broadcast over ``like`` ``(N, ...)``."""
    return values.view(-1, *[1] * (like.dim() - 1))


def one_a_row(value: Tensor, rows: int) -> Tensor:
    """Return a discriminator's output, ``(N,)`` or ``(N, 1)``, as ``(N,)``; ModelError for other shapes."""
    if value.shape not in ((rows,), (rows, 1)):
        raise ModelError(
            f"discriminator: returned shape {tuple(value.shape)} for {rows} rows, expected ({rows},) or ({rows}, 1)"
        )
    return value.reshape(rows)


def check_images(x: Tensor) -> None:
    """Raise InvalidArgumentError for what is no batch of images."""
    if x.dim() != 4:
        raise InvalidArgumentError("x", f"shape {tuple(x.shape)}", "images (N, C, H, W)")


def with_zero_gradient(value: Tensor, source: Tensor) -> Tensor:
    """Give a value a gradient of zero by its source of the same shape."""
    return torch.where(torch.ones((), dtype=torch.bool, device=value.device), value, source)
