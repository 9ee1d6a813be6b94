"""Natural scene statistics: how the local contrast of an image is distributed.

Mittal, Moorthy, Bovik, "No-Reference Image Quality Assessment in the Spatial Domain" (2012).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.detectors._features.aggd import fit_aggd
from robust_ext.detectors._features.dispersion import root

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
