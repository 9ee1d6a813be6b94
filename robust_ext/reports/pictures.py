"""Examples as images in a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.errors import MissingDependencyError
from robust_ext.core.examples import Example as Example

_MAGENTA = (204, 0, 153)


class Panels(NamedTuple):
    """The images of one example by title, as data URIs of PNG files with one pixel a pixel, and what they leave out.

    Values of points beyond the bounds are shown as black or white. In differences 0 is mid grey, and the largest
    absolute value of all, ``scale``, is black or white.
    """

    images: Mapping[str, str]
    scale: float
    notes: tuple[str, ...]


def panels(example: Example) -> Panels:
    """Return the images of an example whose ``is_image`` is true."""
    channels = example.clean.shape[0]
    shown = slice(None) if channels in (1, 3) else slice(0, 1)
    given = {"input": example.clean, "planted": example.planted, "candidate": example.candidate}
    points = {title: np.asarray(one[shown], dtype=np.float64) for title, one in given.items() if one is not None}
    low, high = example.bounds
    clean, candidate = points["input"], points["candidate"]
    finite = {title: np.isfinite(one) & np.isfinite(clean) for title, one in points.items()}
    moved = {
        title: np.where(finite[title], one, 0.0) - np.where(finite[title], clean, 0.0)
        for title, one in points.items()
        if title != "input"
    }
    scale = max(float(np.abs(one).max()) for one in moved.values())
    beyond = finite["candidate"] & ((candidate < low) | (candidate > high))
    notes = {
        f"first of {channels} channels": channels not in (1, 3),
        "values that are not finite are magenta": not finite["candidate"].all(),
        "values beyond the bounds are cut": beyond.any(),
    }
    images = {title: _png((one - low) / (high - low), np.isfinite(one)) for title, one in points.items()}
    images |= {
        f"{title} - input": _png(0.5 + 0.5 * one / (scale or 1.0), finite[title]) for title, one in moved.items()
    }
    return Panels(images=images, scale=scale, notes=tuple(note for note, holds in notes.items() if holds))


def _png(values: NDArray[np.float64], finite: NDArray[np.bool_]) -> str:
    """Return an image ``(1 or 3, H, W)`` of values in [0, 1] as a data URI; pixels that are not finite in magenta."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError('Images in a report need Pillow: pip install "robust-ext[cli]"') from error
    levels = np.rint(np.clip(np.where(finite, values, 0.0), 0.0, 1.0) * 255).astype(np.uint8)
    pixels = np.moveaxis(levels, 0, -1)
    lost: NDArray[np.bool_] = np.any(~finite, axis=0)
    if lost.any():
        pixels = np.where(lost[..., None], np.array(_MAGENTA, dtype=np.uint8), pixels)
    elif pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
