"""Transformations of inputs in front of a classifier, as defenses that BPDA and EoT get through.

They are no defense against an attacker who knows them (Athalye, Carlini and Wagner, "Obfuscated Gradients Give a False
Sense of Security", 2018, section 5). The gradients of some are 0: attack those as
``BPDA(defense)``, random ones as ``EoT(BPDA(defense), draws=...)``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds, from_unit, to_unit
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.validation import check_choice, check_integer, check_number
from robust_ext.detectors import BitDepth, Median
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_solution import Solution
from robust_ext.models.purifier import Purifier
from robust_ext.models.row_rng import RowRNG

VOTES = ("mean", "majority")


class InputTransformation(Purifier):
    """Any function of inputs to inputs of the same shape, in front of a classifier; one forward pass.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.
        transform: From inputs to inputs of the same shape, each row on its own, without chance.
        steps: How often it is applied.

    Example:
        >>> InputTransformation(nn.Identity(), torch.round)(torch.tensor([[0.2, 0.7]]))
        tensor([[0., 1.]])
    """

    def __init__(self, classifier: nn.Module, transform: Callable[[Tensor], Tensor], *, steps: int = 1) -> None:
        super().__init__(classifier, steps=steps)
        self.transform = transform

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        """The transformed points."""
        return self.transform(point)


class BitDepthReduction(InputTransformation):
    """Rounding to ``2 ** bits`` levels (Xu et al. 2018, section 3.1); its gradient is 0.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.
        bits: From 1 to 16.
        bounds: Of the inputs.
    """

    def __init__(self, classifier: nn.Module, *, bits: int = 3, bounds: Sequence[float] = (0.0, 1.0)) -> None:
        super().__init__(classifier, BitDepth(bits=bits, bounds=check_bounds(bounds)))


class MedianSmoothing(InputTransformation):
    """The median of a square window around each pixel (Xu et al. 2018, section 3.2); it has a gradient.

    Args:
        classifier: From images ``(N, ..., H, W)`` to logits ``(N, K)``, in eval mode.
        size: Side of the window, at least 2.
    """

    def __init__(self, classifier: nn.Module, *, size: int = 3) -> None:
        super().__init__(classifier, Median(size=size))


class JPEGCompression(InputTransformation):
    """Each image saved as JPEG and read again, by Pillow (Dziugaite et al. 2016); its gradient is 0.

    Images of three channels are saved in colour with Pillow's subsampling of it, else each channel as a grey image.

    Args:
        classifier: From images ``(N, C, H, W)`` to logits ``(N, K)``, in eval mode.
        quality: From 1 to 100.
        truncate: Whether values are cut off to whole numbers from 0 to 255 as in ART, and not rounded.
        bounds: Of the inputs.

    Raises:
        MissingDependencyError: Pillow is not installed.
    """

    def __init__(
        self,
        classifier: nn.Module,
        *,
        quality: int = 50,
        truncate: bool = False,
        bounds: Sequence[float] = (0.0, 1.0),
    ) -> None:
        super().__init__(classifier, self._reread)
        self.quality = check_integer("quality", quality, minimum=1, maximum=100)
        self.truncate = truncate
        self.bounds = check_bounds(bounds)
        _pillow()

    def _reread(self, x: Tensor) -> Tensor:
        if x.dim() != 4:
            raise InvalidArgumentError("x", f"shape {tuple(x.shape)}", "images (N, C, H, W)")
        with torch.no_grad():
            values = to_unit(x, self.bounds).float() * 255
            whole = (values if self.truncate else values.round()).clamp(0, 255).to(torch.uint8).cpu().numpy()
        read = np.stack([_as_jpeg(image, self.quality) for image in whole])
        coded = from_unit(torch.from_numpy(read).to(x) / 255, self.bounds)
        return _with_zero_gradient(coded, x)


class RandomResizePad(AdaptiveDefense):
    """Each image resized to a random size and put at a random place on a plain ground (Xie et al. 2018).

    The classifier gets images of ``largest`` times the size, in which the resized ones lie anywhere. It is part of the
    readout, so a trace's points are the input; its state holds the height and the place of each row. It has a gradient;
    one forward pass.

    Args:
        classifier: From images of the new size to logits ``(N, K)``, in eval mode.
        smallest: Least size, relative to the image's, above 0.
        largest: Relative size of what the classifier gets, and limit of the resized image, which is smaller unless
            ``smallest`` is the same; at least ``smallest``.
        fill: Of the ground, in units of [0, 1]; 0.5 in the paper's code.
        mode: Of ``torch.nn.functional.interpolate``: ``"nearest"`` as in the paper's code, or ``"bilinear"``.
        bounds: Of the inputs.
        seed: Of the sizes and places.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> defense = RandomResizePad(nn.Flatten(), smallest=0.5, largest=1.0, seed=0)
        >>> defense(torch.zeros(1, 1, 4, 4)).shape
        torch.Size([1, 16])
    """

    random = True

    def __init__(
        self,
        classifier: nn.Module,
        *,
        smallest: float = 1.0,
        largest: float = 331 / 299,
        fill: float = 0.5,
        mode: str = "nearest",
        bounds: Sequence[float] = (0.0, 1.0),
        seed: int | None = None,
    ) -> None:
        super().__init__(classifier, seed=seed)
        self.smallest = check_number("smallest", smallest, minimum=0, open_minimum=True)
        self.largest = check_number("largest", largest, minimum=self.smallest)
        self.bounds = check_bounds(bounds)
        low, high = self.bounds
        self.fill = check_number("fill", fill, minimum=0, maximum=1) * (high - low) + low
        self.mode = check_choice("mode", mode, ("nearest", "bilinear"))

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Draw each row's size and place."""
        if x.dim() != 4:
            raise InvalidArgumentError("x", f"shape {tuple(x.shape)}", "images (N, C, H, W)")
        places = torch.tensor([self._place(rng.generator(row, "place"), x) for row in range(len(x))])
        return Solution(x, (x,), {name: places[:, column].to(x.device) for column, name in enumerate(_PLACE)})

    def readout(self, point: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Logits ``(N, K)`` of the images in their places."""
        out: Tensor = self.classifier(self.place(point, state))
        return out

    def place(self, point: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """What the classifier gets for images ``(N, C, H, W)`` and a state."""
        full = self._limits(point)[1]
        placed = []
        for row, values in enumerate(zip(*(state[name].tolist() for name in _PLACE), strict=True)):
            height, width, top, left = values
            align = {} if self.mode == "nearest" else {"align_corners": False}
            small = nn.functional.interpolate(point[row : row + 1], (height, width), mode=self.mode, **align)
            around = (left, full[1] - width - left, top, full[0] - height - top)
            placed.append(nn.functional.pad(small, around, value=self.fill))
        return torch.cat(placed)

    def _limits(self, x: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
        """Least and greatest height and width."""
        height, width = x.shape[-2:]
        least = max(1, round(self.smallest * height)), max(1, round(self.smallest * width))
        return least, (max(1, round(self.largest * height)), max(1, round(self.largest * width)))

    def _place(self, generator: torch.Generator, x: Tensor) -> tuple[int, int, int, int]:
        def draw(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        least, full = self._limits(x)
        height = least[0] + draw(max(full[0] - least[0], 1))
        share = (height - least[0]) / max(full[0] - least[0], 1)
        width = round(least[1] + share * (full[1] - least[1]))
        return height, width, draw(full[0] - height + 1), draw(full[1] - width + 1)


_PLACE = ("height", "width", "top", "left")


class RandomizedSmoothing(AdaptiveDefense):
    """The mean softmax, or the share of votes, of many noisy copies of an input (Cohen et al. 2019).

    The noise is part of the readout, so a trace's points are the input; its state holds the seeds of the noise. Each
    answer takes ``samples`` forward passes. The mean has a gradient; that of the votes is 0: attack them with
    ``BPDA(smoothing, backward=...)`` and the mean, or the classifier, as substitute.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode, trained with noise.
        noise: Standard deviation, at least 0, for inputs in [0, 1]; follows the width of other bounds.
        samples: At least 1.
        vote: ``"majority"`` or ``"mean"``.
        chunk: Copies of each row in one batch, at least 1.
        bounds: Of the inputs; noisy copies are not clipped to them.
        seed: Of the noise.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> smoothed = RandomizedSmoothing(nn.Identity(), samples=100, noise=1.0, seed=0)
        >>> smoothed(torch.tensor([[0.0, 4.0]])).exp().round(decimals=1)
        tensor([[0., 1.]])
    """

    random = True
    output = "probabilities"

    def __init__(
        self,
        classifier: nn.Module,
        *,
        noise: float = 0.25,
        samples: int = 100,
        vote: str = "majority",
        chunk: int = 10,
        bounds: Sequence[float] = (0.0, 1.0),
        seed: int | None = None,
    ) -> None:
        super().__init__(classifier, seed=seed)
        self.bounds = check_bounds(bounds)
        self.noise = check_number("noise", noise, minimum=0) * (self.bounds[1] - self.bounds[0])
        self.samples = check_integer("samples", samples, minimum=1)
        self.vote = check_choice("vote", vote, VOTES)
        self.chunk = check_integer("chunk", chunk, minimum=1)

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """The input as it is, and the seeds of the noise."""
        return Solution(x, (x,), {"seeds": torch.tensor(rng.seeds, dtype=torch.int64)})

    def readout(self, point: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Probabilities ``(N, K)``, or shares of votes."""
        rng = RowRNG(state["seeds"])
        parts = []
        for first in range(0, self.samples, self.chunk):
            numbers = range(first, min(first + self.chunk, self.samples))
            noisy = torch.cat([point + self.noise * rng.normal(point, "noise", number) for number in numbers])
            parts.append(self._shares(self.classifier(noisy)).view(len(numbers), len(point), -1).sum(0))
        return torch.stack(parts).sum(0) / self.samples

    def _shares(self, logits: Tensor) -> Tensor:
        if self.vote == "mean":
            return logits.softmax(1)
        votes = nn.functional.one_hot(logits.argmax(1), logits.shape[1]).to(logits)
        return _with_zero_gradient(votes, logits)


def _with_zero_gradient(value: Tensor, source: Tensor) -> Tensor:
    """The value as a function of its source that is flat, where otherwise no gradient could be asked for."""
    if not (torch.is_grad_enabled() and source.requires_grad):
        return value
    flat: Tensor = _Flat.apply(value, source)  # type: ignore[no-untyped-call]
    return flat


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, Tensor]:
        (source,) = ctx.saved_tensors
        return None, torch.zeros_like(source)


def _as_jpeg(image: np.ndarray[Any, np.dtype[np.uint8]], quality: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An image ``(C, H, W)`` saved and read again."""
    library = _pillow()
    together = len(image) == 3
    parts = []
    for part in [image.transpose(1, 2, 0)] if together else image:
        buffer = io.BytesIO()
        library.fromarray(part).save(buffer, format="jpeg", quality=quality)
        with library.open(buffer) as saved:
            parts.append(np.array(saved))
    return parts[0].transpose(2, 0, 1) if together else np.stack(parts)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError('JPEG compression needs Pillow: pip install "robust-ext[defenses]"') from error
    return Image
