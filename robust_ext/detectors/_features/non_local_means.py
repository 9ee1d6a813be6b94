"""Non-local means: each pixel becomes the average of pixels around which the image looks alike.

Buades, Coll, Morel, "A non-local algorithm for image denoising" (2005), in the form of OpenCV's fastNlMeansDenoising.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from robust_ext.core.bounds import from_unit, to_unit
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.validation import check_integer, check_number
from robust_ext.detectors._features.lab import from_lab, to_lab
from robust_ext.detectors._features.squeezers import Squeezer


class _Windows(Squeezer):
    """What both kinds are given."""

    def __init__(
        self, *, search: int = 13, patch: int = 3, strength: float = 2.0, bounds: Sequence[float] = (0.0, 1.0)
    ) -> None:
        super().__init__(bounds=bounds)
        self.search = _check_odd("search", search)
        self.patch = _check_odd("patch", patch)
        self.strength = check_number("strength", strength, minimum=0, open_minimum=True)

    @property
    def settings(self) -> dict[str, Any]:
        """What the constructor was given."""
        return {"search": self.search, "patch": self.patch, "strength": self.strength, **super().settings}


class NonLocalMeans(_Windows):
    """Non-local means, with gradients (Xu et al. 2018, section 3.2).

    A pixel becomes the mean of those in the search window around it, weighted by ``exp(-d / strength^2)``, where d is
    the mean squared difference of the patches around both, in grey levels (256 from bound to bound). Three channels are
    turned into Lab first, and lightness and colour are averaged apart. It is what :class:`OpenCVNonLocalMeans` does,
    but for OpenCV's rounding to 8 bits.

    Args:
        search: Side of the search window, odd.
        patch: Side of a patch, odd.
        strength: h: how far patches may differ, in grey levels.
        bounds: Of the inputs.

    Raises:
        InvalidArgumentError: A setting is not accepted.
    """

    kind = "non_local_means"

    def forward(self, x: Tensor) -> Tensor:
        """Filter images ``(N, C, H, W)`` of one or three channels, larger than half a search window and a patch."""
        _check_images(x, self.search // 2 + self.patch // 2)
        levels = 255 * to_unit(x, self.bounds)
        if x.shape[1] == 1:
            return from_unit(self._averaged(levels) / 255, self.bounds)
        lab = to_lab(levels)
        averaged = torch.cat([self._averaged(lab[:, :1]), self._averaged(lab[:, 1:])], 1)
        return from_unit(from_lab(averaged) / 255, self.bounds)

    def _averaged(self, levels: Tensor) -> Tensor:
        """Images ``(N, C, H, W)`` in grey levels; all channels make up a patch."""
        margin = self.search // 2 + self.patch // 2
        wide = nn.functional.pad(levels, (margin,) * 4, mode="reflect")
        total, weights = torch.zeros_like(levels), torch.zeros_like(levels[:, :1])
        for row in range(self.search):
            # One row of the search window at a time is kept for the way back.
            added = (
                checkpoint(self._row, wide, row, use_reentrant=False) if wide.requires_grad else self._row(wide, row)
            )
            total, weights = total + added[0], weights + added[1]
        return total / weights

    def _row(self, wide: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """Weighted sum of the pixels in one row of the search window, and the weights."""
        half, edge = self.search // 2, self.patch // 2
        height, width = (length - 2 * half for length in wide.shape[-2:])
        here = wide[..., half : half + height, half : half + width]
        total, weights = torch.zeros((), device=wide.device), torch.zeros((), device=wide.device)
        for column in range(self.search):
            there = wide[..., row : row + height, column : column + width]
            apart = nn.functional.avg_pool2d((here - there).square().mean(1, keepdim=True), self.patch, 1)
            weight = (-apart / self.strength**2).exp()
            total = total + weight * there[..., edge : height - edge, edge : width - edge]
            weights = weights + weight
        return total, weights


class OpenCVNonLocalMeans(_Windows):
    """Non-local means by OpenCV, as the authors of feature squeezing have it; without gradients.

    Images are rounded to 8 bits. Three channels go through ``cv2.fastNlMeansDenoisingColored``, in the order they are
    in, though it takes them for blue, green, red; one channel goes through ``cv2.fastNlMeansDenoising``.

    Args:
        search: Side of the search window, odd.
        patch: Side of a patch, odd.
        strength: h: how far patches may differ, in grey levels.
        bounds: Of the inputs.

    Raises:
        InvalidArgumentError: A setting is not accepted.
    """

    kind = "opencv_non_local_means"
    differentiable = False

    def forward(self, x: Tensor) -> Tensor:
        """Filter images ``(N, C, H, W)`` of one or three channels, on the CPU.

        Raises:
            MissingDependencyError: OpenCV is not installed.
        """
        try:
            import cv2
        except ImportError as error:
            raise MissingDependencyError(
                "the squeezer opencv_non_local_means needs OpenCV: pip install opencv-python-headless; "
                "non_local_means does without"
            ) from error
        _check_images(x, 0)
        pixels = (255 * to_unit(x.detach(), self.bounds)).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu()
        made = torch.empty_like(pixels)
        for row, image in enumerate(pixels.contiguous().numpy()):
            if image.shape[2] == 1:
                done = cv2.fastNlMeansDenoising(image[..., 0], None, self.strength, self.patch, self.search)
            else:
                done = cv2.fastNlMeansDenoisingColored(
                    image, None, self.strength, self.strength, self.patch, self.search
                )
            made[row] = torch.from_numpy(done).view(image.shape)
        return from_unit(made.permute(0, 3, 1, 2).to(x) / 255, self.bounds)


def _check_odd(argument: str, value: object) -> int:
    number = check_integer(argument, value, minimum=1)
    if number % 2 == 0:
        raise InvalidArgumentError(argument, number, "an odd integer")
    return number


def _check_images(x: Tensor, margin: int) -> None:
    if x.dim() != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) <= margin:
        raise InvalidArgumentError(
            "inputs",
            f"shape {tuple(x.shape)}",
            f"images (N, C, H, W) of one or three channels, with H and W above {margin}; for others leave non-local "
            "means out, or take a smaller search window",
        )
