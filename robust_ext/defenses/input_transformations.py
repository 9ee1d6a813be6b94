"""Transformations of inputs in front of a classifier, as defenses that BPDA gets through.

They are no defense against adaptive attacks (Athalye, Carlini and Wagner, "Obfuscated Gradients Give a False Sense of
Security", 2018, section 5). The gradients of some are 0: attack those as ``BPDA(defense)``.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robust_ext.core.errors import MissingDependencyError
from robust_ext.core.modules import given, module_class, positional
from robust_ext.core.settings import setting
from robust_ext.core.validation import from_unit, to_unit
from robust_ext.defenses._common import check_images, with_zero_gradient
from robust_ext.detectors._features.squeezers import BitDepth, Median
from robust_ext.models.adaptive import Purifier
from robust_ext.models.rows import RowRNG, State


@module_class
class _Transformation(Purifier):
    """A function of inputs to inputs of the same shape, once."""

    transform: Callable[[Tensor], Tensor] = dataclasses.field(init=False)
    steps: int = 1

    def step(self, point: Tensor, *, x: Tensor, number: int, state: State, rng: RowRNG) -> Tensor:
        """Return the transformed points."""
        return self.transform(point)


@module_class
class InputTransformation(_Transformation):
    """Any function of inputs to inputs of the same shape, in front of a classifier; one forward pass.

    Example:
        >>> InputTransformation(torch.nn.Identity(), torch.round)(torch.tensor([[0.2, 0.7]]))
        tensor([[0., 1.]])
    """

    transform: Callable[[Tensor], Tensor] = positional(
        "A function from inputs to inputs of the same shape, each row on its own, without chance.", kw_only=False
    )
    steps: int = setting(default=1, help="How often it is applied.", minimum=0)


@module_class
class BitDepthReduction(_Transformation):
    """Rounding to ``2 ** bits`` levels (Xu et al. 2018, section 3.1); its gradient is 0."""

    name = "bit-depth"
    building_blocks = ("IP",)

    bits: int = setting(default=3, help="Bits that are kept of each value.", minimum=1, maximum=16)
    bounds: tuple[float, float] = given("Of the inputs.", default=(0.0, 1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.transform = BitDepth(bits=self.bits, bounds=self.bounds)


@module_class
class MedianSmoothing(_Transformation):
    """The median of a square window around each pixel ``(N, ..., H, W)`` (Xu et al. 2018, section 3.2).

    It has a gradient.
    """

    name = "median"
    building_blocks = ("IP",)

    size: int = setting(default=3, help="Side of the window, at least 2.", minimum=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.transform = Median(size=self.size)


@module_class
class JPEGCompression(_Transformation):
    """Each image ``(N, C, H, W)`` saved as JPEG and read again, by Pillow (Dziugaite et al. 2016); its gradient is 0.

    Images of three channels are saved in colour with Pillow's subsampling of it, else each channel as a grey image.

    Raises:
        MissingDependencyError: Pillow is not installed.
    """

    name = "jpeg"
    building_blocks = ("IP",)

    quality: int = setting(default=50, help="JPEG quality, from 1 to 100.", minimum=1, maximum=100)
    truncate: bool = setting(
        default=False, help="Whether values are cut off to whole numbers from 0 to 255 as in ART, and not rounded."
    )
    bounds: tuple[float, float] = given("Of the inputs.", default=(0.0, 1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        _pillow()

    def step(self, point: Tensor, *, x: Tensor, number: int, state: State, rng: RowRNG) -> Tensor:
        """Return the images after saving and reading."""
        check_images(point)
        with torch.no_grad():
            values = to_unit(point, self.bounds).float() * 255
            whole = (values if self.truncate else values.round()).clamp(0, 255).to(torch.uint8).cpu().numpy()
        coded = torch.from_numpy(np.stack([self._coded(image) for image in whole])).to(point)
        return with_zero_gradient(from_unit(coded / 255, self.bounds), point)

    def _coded(self, image: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Save an image ``(C, H, W)`` and read it again."""
        library, together, parts = _pillow(), len(image) == 3, []
        for part in [image.transpose(1, 2, 0)] if together else image:
            buffer = io.BytesIO()
            library.fromarray(part).save(buffer, format="jpeg", quality=self.quality)
            with library.open(buffer) as saved:
                parts.append(np.array(saved))
        return parts[0].transpose(2, 0, 1) if together else np.stack(parts)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError('JPEG compression needs Pillow: pip install "robust-ext[defenses]"') from error
    return Image
