"""Natural scene statistics: how the local contrast of an image is distributed.

Mittal, Moorthy, Bovik, "No-Reference Image Quality Assessment in the Spatial Domain" (2012).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.detectors._features.regression import root

# The shapes of the table that this fit is commonly read from end at 10; sparse images need lower ones than its 0.2.
LOWEST_SHAPE, HIGHEST_SHAPE = 0.1, 10.0
_HALVINGS = 50


@dataclass(frozen=True)
class Aggd:
    """Fitted distributions, ``(N,)`` each.

    ``shape`` is alpha (1 for a Laplace, 2 for a normal distribution), ``mean`` eta, ``left`` the variance about 0 of
    the values below 0, and ``right`` that of the others.
    """

    shape: Tensor
    mean: Tensor
    left: Tensor
    right: Tensor


def fit_aggd(values: Tensor) -> Aggd:
    """Fit one distribution to each row of values ``(N, M)`` by moment matching, with gradients; float64 is advisable.

    With s_l and s_r the root mean squares of the values below 0 and of the others, and g = s_l / s_r, the shape solves
    ``Gamma(2/a)^2 / (Gamma(1/a) Gamma(3/a)) = mean|v|^2 / mean(v^2) * (g^3 + 1)(g + 1) / (g^2 + 1)^2``. The left side
    grows from 0 to 3/4 and no further, and the right side may lie above: the shape is kept in [0.1, 10], where it has
    no gradient at the ends. A side without values has variance 0, and a row of zeros the lowest shape. The gradient
    ignores that values may change sides.

    Example:
        >>> values = torch.randn(1, 50000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> fitted = fit_aggd(values)
        >>> round(fitted.shape.item(), 1), round(fitted.left.item(), 1), round(fitted.right.item(), 1)
        (2.0, 1.0, 1.0)
    """
    squares = values.square()
    below = values < 0
    left = _mean_where(squares, below)
    right = _mean_where(squares, ~below)
    s_l, s_r = root(left), root(right)
    # The factor in g, multiplied by s_r^4, has no quotient that fails where the right side is empty.
    ratio = _quotient(values.abs().mean(1).square(), squares.mean(1))
    ratio = ratio * _quotient((s_l**3 + s_r**3) * (s_l + s_r), (left + right).square())
    shape: Tensor = _Shape.apply(ratio)  # type: ignore[no-untyped-call]
    scale = (0.5 * (torch.lgamma(1 / shape) - torch.lgamma(3 / shape))).exp()
    mean = (s_r - s_l) * scale * (torch.lgamma(2 / shape) - torch.lgamma(1 / shape)).exp()
    return Aggd(shape, mean, left, right)


class _Shape(torch.autograd.Function):
    """The shape whose moment ratio is given, by bisection; its derivative is that of the inverse function."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, ratio: Tensor) -> Tensor:
        low = torch.full_like(ratio, math.log(LOWEST_SHAPE))
        high = torch.full_like(ratio, math.log(HIGHEST_SHAPE))
        inside = (ratio > _log_ratio(low.exp()).exp()) & (ratio < _log_ratio(high.exp()).exp())
        target = ratio.log()
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = _log_ratio(middle.exp()) < target
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        shape = ((low + high) / 2).exp()
        ctx.save_for_backward(shape, ratio, inside)
        return shape

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        shape, ratio, inside = ctx.saved_tensors
        slope = torch.digamma(1 / shape) + 3 * torch.digamma(3 / shape) - 4 * torch.digamma(2 / shape)
        return torch.where(inside, gradient * shape.square() / (slope * torch.where(inside, ratio, 1)), 0)


def _log_ratio(shape: Tensor) -> Tensor:
    return 2 * torch.lgamma(2 / shape) - torch.lgamma(1 / shape) - torch.lgamma(3 / shape)


def _mean_where(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0).sum(1) / mask.sum(1).clamp_min(1)


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """The quotient, and 0 where the denominator is 0."""
    return torch.where(below > 0, above / torch.where(below > 0, below, 1), 0)


WINDOW, SIGMA = 7, 7 / 6
# Of one of 256 grey levels, for numbers in [0, 1].
CONSTANT = 1 / 255
# ITU-R BT.709.
_GREY = (0.2125, 0.7154, 0.0721)
# Far below what a float32 image can show, far above the rounding errors of float64.
_NOTHING = 1e-12


def grey_of(x: Tensor) -> Tensor:
    """Images ``(N, C, H, W)`` of one or three channels (red, green, blue) as grey ones, float64 ``(N, H, W)``.

    InvalidArgumentError: they are of another shape, or below 2 x 2.
    """
    if x.dim() != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) < 2:
        expected = "images (N, C, H, W) of one or three channels, with H and W of at least 2; else another detector"
        raise InvalidArgumentError("inputs", f"shape {tuple(x.shape)}", expected)
    wide = x.double()
    if x.shape[1] == 1:
        return wide[:, 0]
    return torch.einsum("nchw,c->nhw", wide, wide.new_tensor(_GREY))


def contrast_of(grey: Tensor) -> Tensor:
    """Mean-subtracted contrast-normalised coefficients of images ``(N, H, W)`` in [0, 1], of the same shape.

    ``(I - mu) / (sigma + 1/255)``, with mu and ``sigma = sqrt(|mu^2 - mean of I^2|)`` over a Gaussian window of 7 x 7
    with standard deviation 7/6, beyond the edges of which the image is black.
    """
    offsets = torch.arange(WINDOW, dtype=grey.dtype, device=grey.device) - WINDOW // 2
    line = (-offsets.square() / (2 * SIGMA**2)).exp()
    window = torch.outer(line, line)[None, None] / line.sum() ** 2
    both = torch.cat([grey, grey.square()])[:, None]
    mean, square = nn.functional.conv2d(both, window, padding=WINDOW // 2).squeeze(1).chunk(2)
    deviation = root((mean.square() - square).abs(), above=_NOTHING)
    difference = grey - mean
    # In flat regions rounding would decide on which side of 0 a coefficient counts.
    difference = difference - torch.where(difference.abs() < _NOTHING, difference, 0).detach()
    return difference / (deviation + CONSTANT)


def natural_features(x: Tensor) -> Tensor:
    """The 18 features of images ``(N, C, H, W)`` in [0, 1], 1 or 3 channels, float64 ``(N, 18)``, with gradients.

    Of the coefficients: shape, and mean of the left and right variance; then of their products with the right, lower,
    lower right and lower left neighbour: shape, mean, left and right variance.
    """
    field = contrast_of(grey_of(x))
    own = fit_aggd(field.flatten(1))
    features = [own.shape, (own.left + own.right) / 2]
    for first, second in (
        (field[:, :, :-1], field[:, :, 1:]),
        (field[:, :-1], field[:, 1:]),
        (field[:, :-1, :-1], field[:, 1:, 1:]),
        (field[:, 1:, :-1], field[:, :-1, 1:]),
    ):
        pair = fit_aggd((first * second).flatten(1))
        features += [pair.shape, pair.mean, pair.left, pair.right]
    return torch.stack(features, 1)
