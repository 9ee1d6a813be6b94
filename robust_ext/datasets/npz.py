"""Arrays of images and labels in one ``.npz`` file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.files import ArrayArchive, UnreadableArraysError
from robust_ext.datasets.base import Dataset, build_dataset, reading, unusable

MOST_CLASSES = 100_000

_BOTH = ("images", "labels"), ("x", "y")
_FIX = "correct the arrays and save them again with numpy.savez"


def load_npz(path: Path, split: str) -> Dataset:
    """Images and labels of one file.

    The arrays are ``x_test`` and ``y_test`` (``x_train`` and ``y_train`` for the other split), or, for a file without
    splits, ``images`` and ``labels`` or ``x`` and ``y``, which are used for any split. Images are ``(N, H, W)``,
    ``(N, C, H, W)`` or ``(N, H, W, C)`` with C of 1, 3 or 4; uint8, or floats in [0, 1], which become float32.
    Labels are integers ``(N,)`` or ``(N, 1)``. ``class_names`` is optional; without it there are as many classes as
    the highest label needs. Object arrays, which would be pickles, are refused.
    """
    arrays, keys = _read(path, split)
    images = _to_channels_first(path, _to_pixels(path, arrays["images"]))
    labels = arrays["labels"]
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    names = arrays.get("class_names")
    if names is None:
        class_names = [str(label) for label in range(_count_classes(path, labels))]
    elif names.ndim == 1 and names.dtype.kind == "U":
        class_names = [str(name) for name in names]
    else:
        got = f"class_names of shape {names.shape} and dtype {names.dtype}"
        raise unusable(path, got, "a list of texts", _FIX)
    name = path.stem if keys in _BOTH else f"{path.stem}-{split}"
    return build_dataset([path], name=name, images=images, labels=labels, class_names=class_names, then=_FIX)


def _read(path: Path, split: str) -> tuple[dict[str, NDArray[Any]], tuple[str, str]]:
    """The arrays ``images``, ``labels`` and perhaps ``class_names``, and the keys the first two had."""
    pairs = ((f"x_{split}", f"y_{split}"), *_BOTH)
    expected = "arrays " + ", or ".join(" and ".join(pair) for pair in pairs)
    with reading(path), path.open("rb") as file:
        try:
            archive = ArrayArchive(file)
            keys = next((pair for pair in pairs if set(pair) <= set(archive.names)), None)
            if keys is None:
                got = "arrays " + (", ".join(archive.names) or "(none)")
                raise unusable(path, got, expected, "rename the arrays, or choose the other split")
            wanted = {"images": keys[0], "labels": keys[1], "class_names": "class_names"}
            wanted = {name: key for name, key in wanted.items() if key in archive.names}
            arrays = archive.read(*wanted.values())
            return {name: arrays[key] for name, key in wanted.items()}, keys
        except UnreadableArraysError as error:
            raise unusable(path, str(error), expected, _FIX) from error


def _to_pixels(path: Path, images: NDArray[Any]) -> NDArray[Any]:
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f":
        then = "convert pixels of 0..255 to uint8, and save them again with numpy.savez"
        raise unusable(path, f"images of dtype {images.dtype}", "uint8, or floats in [0, 1]", then)
    # What overflows becomes infinite, and is refused as such.
    with np.errstate(over="ignore", invalid="ignore"):
        return images.astype(np.float32, copy=False)


def _to_channels_first(path: Path, images: NDArray[Any]) -> NDArray[Any]:
    """A view ``(N, C, H, W)`` of the images."""
    if images.ndim == 3:
        return images[:, None]
    expected = "shape (N, H, W), (N, C, H, W) or (N, H, W, C) with 1, 3 or 4 channels C at one end only"
    then = (
        "transpose the images to (N, C, H, W), so that only one end can be the channels, or pass them from Python as "
        "robust_ext.datasets.Dataset, which takes (N, C, H, W) with any sizes"
    )
    first, last = (images.ndim == 4 and images.shape[axis] in (1, 3, 4) for axis in (1, -1))
    if first == last:
        raise unusable(path, f"images of shape {images.shape}", expected, then)
    return images if first else np.moveaxis(images, -1, 1)


def _count_classes(path: Path, labels: NDArray[Any]) -> int:
    """One more than the highest label; 0 where the dataset's own checks refuse the labels."""
    if labels.dtype.kind not in "iu" or labels.size == 0:
        return 0
    highest = int(labels.max())
    if highest >= MOST_CLASSES:
        expected = f"labels below {MOST_CLASSES}, or class_names for more classes"
        raise unusable(path, f"a label of {highest}", expected, _FIX)
    return highest + 1
