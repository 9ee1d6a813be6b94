"""Arrays of images, or a table, and labels in one ``.npz`` file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from robust_ext.datasets.base import Dataset, build_dataset, reading, unusable

MOST_CLASSES = 100_000
# A file may unpack to this many bytes, or to that many times its own size where that is more.
_MOST_BYTES, _MOST_RATIO = 256 * 2**20, 100

_BOTH = ("images", "labels"), ("x", "y")
_FIX = "correct the arrays and save them again with numpy.savez"


def load_npz(path: Path, split: str) -> Dataset:
    """Images, or the rows of a table, and labels of one file.

    The arrays are ``x_test`` and ``y_test`` (``x_train`` and ``y_train`` for the other split), or, for a file without
    splits, ``images`` and ``labels`` or ``x`` and ``y``, which are used for any split. Images are ``(N, H, W)``,
    ``(N, C, H, W)`` or ``(N, H, W, C)`` with C of 1, 3 or 4; uint8, or floats in [0, 1], which become float32. A table
    is ``(N, D)``, floats in any units.
    Labels are integers ``(N,)`` or ``(N, 1)``. ``class_names`` is optional; without it there are as many classes as
    the highest label needs. Object arrays, which would be pickles, are refused.
    """
    arrays, keys = _read(path, split)
    images = _pixels(path, arrays["images"])
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
            archive = np.load(file, allow_pickle=False)
            names = list(archive) if isinstance(archive, NpzFile) else ["a single one without a name"]
            wrong = wrong_size(archive) if isinstance(archive, NpzFile) else ""
            keys = next((pair for pair in pairs if set(pair) <= set(names)), None)
            wanted = {"images": keys[0], "labels": keys[1], "class_names": "class_names"} if keys else {}
            arrays = {name: archive[key] for name, key in wanted.items() if key in names and not wrong}
        # zipfile, zlib and numpy raise a dozen kinds of errors for damaged data.
        except Exception as error:
            got = f"an error while reading ({type(error).__name__}: {error})"
            raise unusable(path, got, expected, _FIX) from error
    if wrong:
        raise unusable(path, wrong, expected, _FIX)
    if keys is None:
        got = "arrays " + (", ".join(names) or "(none)")
        raise unusable(path, got, expected, "rename the arrays, or choose the other split")
    return arrays, keys


def wrong_size(archive: NpzFile) -> str:
    """Describe an archive that unpacks to far more than it holds, or an array of another size than its header's."""
    packed_arrays: Any = archive.zip
    entries = [one for one in packed_arrays.infolist() if one.filename.endswith(".npy")]
    packed, total = sum(one.compress_size for one in entries), sum(one.file_size for one in entries)
    if total > max(_MOST_BYTES, _MOST_RATIO * packed):
        return (
            f"{packed:,} bytes that unpack to {total:,}, more than {_MOST_BYTES:,} and more than {_MOST_RATIO} times "
            "as many (large arrays that are meant are to be saved without compression)"
        )
    for entry in entries:
        with packed_arrays.open(entry) as stream:
            read = npy.read_array_header_1_0 if npy.read_magic(stream) == (1, 0) else npy.read_array_header_2_0
            shape, _, kind = read(stream)
            held, declared = entry.file_size - stream.tell(), int(np.prod(shape, dtype=object)) * kind.itemsize
            if not kind.hasobject and declared != held:
                return f"{entry.filename} of {held} bytes where shape {shape} needs {declared}"
    return ""


def _pixels(path: Path, images: NDArray[Any]) -> NDArray[Any]:
    """The images as ``(N, C, H, W)``, uint8 or float32, or a table ``(N, D)``, float32."""
    if images.ndim == 2 and images.dtype.kind != "f":
        then = "convert it (table.astype(numpy.float32)), and save it again with numpy.savez"
        raise unusable(path, f"a table of dtype {images.dtype}", "floats", then)
    if images.dtype != np.uint8:
        if images.dtype.kind != "f":
            then = "convert pixels of 0..255 to uint8, and save them again with numpy.savez"
            raise unusable(path, f"images of dtype {images.dtype}", "uint8, or floats in [0, 1]", then)
        # What overflows becomes infinite, and is refused as such.
        with np.errstate(over="ignore", invalid="ignore"):
            images = images.astype(np.float32, copy=False)
    if images.ndim == 2:
        return images
    if images.ndim == 3:
        return images[:, None]
    first, last = (images.ndim == 4 and images.shape[axis] in (1, 3, 4) for axis in (1, -1))
    if first == last:
        expected = "shape (N, D), (N, H, W), (N, C, H, W) or (N, H, W, C) with 1, 3 or 4 channels C at one end only"
        then = (
            "transpose the images to (N, C, H, W), so that only one end can be the channels, or pass them from Python "
            "as robust_ext.datasets.Dataset, which takes (N, C, H, W) with any sizes"
        )
        raise unusable(path, f"images of shape {images.shape}", expected, then)
    return images if first else np.moveaxis(images, -1, 1)


def _count_classes(path: Path, labels: NDArray[Any]) -> int:
    """One more than the highest label, or the columns; 0 where the dataset's own checks refuse the labels."""
    if labels.ndim == 2:
        return int(labels.shape[1])
    if labels.dtype.kind not in "iu" or labels.size == 0:
        return 0
    highest = int(labels.max())
    if highest >= MOST_CLASSES:
        expected = f"labels below {MOST_CLASSES}, or class_names for more classes"
        raise unusable(path, f"a label of {highest}", expected, _FIX)
    return highest + 1
