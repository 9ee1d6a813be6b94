"""Arrays of images and labels in one ``.npz`` file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from robust_ext.core.errors import DataError
from robust_ext.datasets.base import Dataset
from robust_ext.datasets.files import build_dataset, reading, unusable

CHANNEL_COUNTS = (1, 3, 4)
MOST_CLASSES = 100_000

_BOTH = ("images", "labels"), ("x", "y")
_FIX = "correct the arrays and save them again with numpy.savez"


def load_npz(path: Path, split: str) -> Dataset:
    """Images and labels of one file.

    The arrays are ``x_test`` and ``y_test`` (``x_train`` and ``y_train`` for the other split), or, for a file without
    splits, ``images`` and ``labels`` or ``x`` and ``y``, which are used for any split. Images are ``(N, H, W)``,
    ``(N, C, H, W)`` or ``(N, H, W, C)`` with C of 1, 3 or 4; uint8, or floats in [0, 1], which become float32.
    Labels are integers ``(N,)`` or ``(N, 1)``. ``class_names`` is optional; without it there are as many classes as
    the highest label needs.

    Args:
        path: The file; object arrays, which would be pickles, are refused.
        split: ``"train"`` or ``"test"``.

    Raises:
        DataError: The file is damaged, or does not hold such arrays.
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
        raise unusable(path, got=got, expected="a list of texts", then=_FIX)
    name = path.stem if keys in _BOTH else f"{path.stem}-{split}"
    return build_dataset([path], name=name, images=images, labels=labels, class_names=class_names, then=_FIX)


def _read(path: Path, split: str) -> tuple[dict[str, NDArray[Any]], tuple[str, str]]:
    """The arrays ``images``, ``labels`` and perhaps ``class_names``, and the keys the first two had."""
    pairs = ((f"x_{split}", f"y_{split}"), *_BOTH)
    expected = "arrays " + ", or ".join(" and ".join(pair) for pair in pairs)
    with reading(path), path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
            held = list(archive.files) if isinstance(archive, NpzFile) else None
        except Exception as error:
            raise _damaged(path, error) from error
        if held is None:
            raise unusable(path, got="a single array", expected=expected, then="save both with numpy.savez")
        keys = next((pair for pair in pairs if set(pair) <= set(held)), None)
        if keys is None:
            then = "rename the arrays, or choose the other split"
            raise unusable(path, got="arrays " + (", ".join(held) or "(none)"), expected=expected, then=then)
        wanted = {"images": keys[0], "labels": keys[1]}
        if "class_names" in held:
            wanted["class_names"] = "class_names"
        try:
            return {name: np.asarray(archive[key]) for name, key in wanted.items()}, keys
        except Exception as error:
            raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    # zipfile, zlib and numpy's header parser raise a dozen kinds of errors for damaged data; all mean the same here.
    got = f"an error while reading ({type(error).__name__}: {error})"
    return unusable(path, got=got, expected="arrays of numbers as numpy.savez writes them", then=_FIX)


def _to_pixels(path: Path, images: NDArray[Any]) -> NDArray[Any]:
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f":
        then = "convert pixels of 0..255 to uint8, and save them again with numpy.savez"
        raise unusable(path, got=f"images of dtype {images.dtype}", expected="uint8, or floats in [0, 1]", then=then)
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
    first, last = (images.ndim == 4 and images.shape[axis] in CHANNEL_COUNTS for axis in (1, -1))
    if first == last:
        raise unusable(path, got=f"images of shape {images.shape}", expected=expected, then=then)
    return images if first else np.moveaxis(images, -1, 1)


def _count_classes(path: Path, labels: NDArray[Any]) -> int:
    """One more than the highest label; 0 where the dataset's own checks will refuse the labels."""
    if labels.dtype.kind not in "iu" or labels.size == 0:
        return 0
    highest = int(labels.max())
    if highest >= MOST_CLASSES:
        expected = f"labels below {MOST_CLASSES}, or class_names for more classes"
        raise unusable(path, got=f"a label of {highest}", expected=expected, then=_FIX)
    return highest + 1
