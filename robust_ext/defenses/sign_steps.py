"""Steps along the sign of a gradient, in a box around the input and inside the bounds."""

from __future__ import annotations

from torch import Tensor


def keep_in(point: Tensor, *, x: Tensor, radius: float | None, bounds: tuple[float, float] | None) -> Tensor:
    """The nearest point in an linf ball around ``x`` and in the bounds.

    A point that lies in both comes back to the last bit. Gradients flow to ``point`` where it was free to move, and to
    ``x`` where the ball held it.

    Args:
        point: ``(N, ...)``.
        x: ``(N, ...)``, in the bounds.
        radius: Of the ball, in the units of the inputs; None for no ball.
        bounds: Lowest and highest value; None for no bounds.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 0.5, 1.0]])
        >>> keep_in(x + 0.5, x=x, radius=0.25, bounds=(0.0, 1.0))
        tensor([[0.2500, 0.7500, 1.0000]])
    """
    if radius is not None:
        point = point.maximum(x - radius).minimum(x + radius)
    return point if bounds is None else point.clamp(*bounds)


def over_rows(values: Tensor, like: Tensor) -> Tensor:
    """Values ``(N,)`` in a shape that broadcasts over ``like`` ``(N, ...)``."""
    return values.view(-1, *[1] * (like.dim() - 1))
