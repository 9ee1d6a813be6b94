"""Random views of images for contrastive losses: crops, flips and colours, differentiable in the image.

Source: Mao et al., "Adversarial Attacks are Reversible with Natural Supervision" (2021), with the views of their code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import SettingsModule, module_class
from robust_ext.core.settings import setting
from robust_ext.models.rows import RowRNG

_RATIOS = (3 / 4, 4 / 3)
_TRIES = 10
_LUMA = (0.2989, 0.587, 0.114)


@dataclass(frozen=True)
class View:
    """A change of an image: a ``crop`` (top, left, height, width) is enlarged to its size and flipped.

    ``colours`` are applied in order: ``"brightness"``, ``"contrast"`` or ``"saturation"`` with a factor of at least 0,
    or ``"hue"`` with a part of a turn; ``grey`` leaves out colour in the end.
    """

    crop: tuple[int, int, int, int]
    flip: bool = False
    colours: tuple[tuple[str, float], ...] = ()
    grey: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """Apply the view to images ``(N, C, H, W)`` in [0, 1]; without three channels, hue and saturation stay."""
        top, left, height, width = self.crop
        out = x[..., top : top + height, left : left + width]
        out = nn.functional.interpolate(out, x.shape[-2:], mode="bilinear", align_corners=False)
        out = out.flip(-1) if self.flip else out
        for kind, amount in self.colours:
            out = _coloured(out, kind, amount)
        return _grey(out).expand_as(out) if self.grey else out


@module_class
class RandomViews(SettingsModule):
    """Draws views and applies them; with the defaults those of Mao et al.'s code."""

    area: float = setting(
        default=0.08, help="Smallest share of the image that a crop has, in (0, 1]; 1 for no crop.", above=0, maximum=1
    )
    flip: float = setting(default=0.5, help="Probability of a flip.", minimum=0, maximum=1)
    jitter: float = setting(
        default=0.8,
        help="Half the width of the range of factors of brightness, contrast and saturation around 1; a quarter of it "
        "is that of the hue's turns around 0. 0 for none.",
        minimum=0,
        maximum=2,
    )
    grey: float = setting(default=0.2, help="Probability of leaving out colour.", minimum=0, maximum=1)
    shared: bool = setting(
        default=True, help="Whether all images of a group get the same view, as in their code, or each one of its own."
    )

    def forward(self, x: Tensor, rng: RowRNG, *keys: int | str) -> Tensor:
        """Return one view of each image ``(N, C, H, W)`` in [0, 1], from the rows' numbers under the keys."""
        if x.dim() != 4:
            raise InvalidArgumentError("x", f"shape {tuple(x.shape)}", "images (N, C, H, W)")
        size = (x.shape[-2], x.shape[-1])
        if self.shared:
            return self.draw(size, rng.generator(0, *keys)).apply(x)
        views = [self.draw(size, rng.generator(row, *keys)) for row in range(len(x))]
        return torch.cat([view.apply(row) for row, view in zip(torch.split(x, 1), views, strict=True)])

    def draw(self, size: tuple[int, int], generator: torch.Generator) -> View:
        """Draw one view for images of height and width ``size``."""

        def uniform(low: float, high: float) -> float:
            return float(torch.rand((), generator=generator)) * (high - low) + low

        crop = self._crop(size, generator)
        flip, grey = uniform(0, 1) < self.flip, uniform(0, 1) < self.grey
        colours = []
        if self.jitter:
            low, high = max(0.0, 1 - self.jitter), 1 + self.jitter
            colours = [(kind, uniform(low, high)) for kind in ("brightness", "contrast", "saturation")]
            colours.append(("hue", uniform(-self.jitter / 4, self.jitter / 4)))
        order: Sequence[int] = torch.randperm(len(colours), generator=generator).tolist()
        return View(crop=crop, flip=flip, colours=tuple(colours[index] for index in order), grey=grey)

    def _crop(self, size: tuple[int, int], generator: torch.Generator) -> tuple[int, int, int, int]:
        height, width = size
        if self.area == 1:
            return 0, 0, height, width
        for _ in range(_TRIES):
            one, two, three, four = torch.rand(4, generator=generator).tolist()
            area = height * width * (one * (1 - self.area) + self.area)
            low, high = map(math.log, _RATIOS)
            ratio = math.exp(two * (high - low) + low)
            h, w = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
            if 0 < h <= height and 0 < w <= width:
                return int(three * (height - h + 1)), int(four * (width - w + 1)), h, w
        # The largest part in the middle whose ratio is allowed.
        ratio = min(max(width / height, _RATIOS[0]), _RATIOS[1])
        h, w = min(height, max(1, round(width / ratio))), min(width, max(1, round(height * ratio)))
        return (height - h) // 2, (width - w) // 2, h, w


def _coloured(x: Tensor, kind: str, amount: float) -> Tensor:
    if kind == "brightness":
        return (x * amount).clamp(0, 1)
    if kind == "contrast":
        return (amount * x + (1 - amount) * _grey(x).mean((1, 2, 3), keepdim=True)).clamp(0, 1)
    if x.shape[1] != 3:
        return x
    return (amount * x + (1 - amount) * _grey(x)).clamp(0, 1) if kind == "saturation" else _turned(x, amount)


def _grey(x: Tensor) -> Tensor:
    """Return the brightness, ``(N, 1, H, W)`` for colours."""
    return (x * x.new_tensor(_LUMA).view(3, 1, 1)).sum(1, keepdim=True) if x.shape[1] == 3 else x


def _turned(x: Tensor, turn: float) -> Tensor:
    """Turn the hue of colours, by way of hue, value and chroma."""
    red, green, blue = x.unbind(1)
    value = x.amax(1)
    chroma = value - x.amin(1)
    divisor = torch.where(chroma == 0, 1, chroma)
    sixths = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    channels = []
    for offset in (5, 3, 1):
        place = (sixths + 6 * turn + offset) % 6
        channels.append(value - chroma * place.minimum(4 - place).clamp(0, 1))
    return torch.stack(channels, 1)
