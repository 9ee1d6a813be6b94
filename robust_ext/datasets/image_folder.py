"""A folder of images: one subfolder a class."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.errors import DataError, MissingDependencyError
from robust_ext.datasets.base import Dataset, build_dataset, reading, unusable

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SPLIT_NAMES = ("train", "test", "val", "valid", "validation")

# Decoders of plain images only: Pillow finds the format by the content, and some formats start other programs.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_GREY_MODES = ("1", "L", "LA")
_DEEP_MODES = ("I", "F")


def load_image_folder(folder: Path, split: str) -> Dataset:
    """Images of ``folder/class/*``, or of ``folder/split/class/*`` where the folder has splits.

    Classes are numbered by their sorted names, images are in the order of their file names. Grey images stay
    ``(N, 1, H, W)``, unless there are colour images too, which makes all of them ``(N, 3, H, W)``; transparency is
    dropped, of an animation the first image is taken. Hidden files, and files that are no images by their suffix,
    are left out. A folder is a split if it is called train, test, val, valid or validation and holds folders.
    """
    with reading(folder):
        splits = [name for name in SPLIT_NAMES if (folder / name).is_dir() and _subfolders(folder / name)]
        if splits and split not in splits:
            then = f"choose another split, or name the folder itself: {folder / splits[0]}"
            raise unusable(folder, "folders " + ", ".join(splits), f"a folder {split}", then)
        top = folder / split if splits else folder
        classes = _subfolders(top)
        files = [[p for p in _visible(path) if p.suffix.lower() in SUFFIXES and p.is_file()] for path in classes]
    if not classes:
        then = "put the images of each class in a folder of its own: FOLDER/CLASS/IMAGE.png"
        raise unusable(top, "no folders in it", "one folder a class", then)
    for path, inside in zip(classes, files, strict=True):
        if not inside:
            raise unusable(path, "no images in it", "files " + ", ".join(SUFFIXES), "add images to it, or remove it")
    paths = [path for inside in files for path in inside]
    labels = np.repeat(np.arange(len(classes)), [len(inside) for inside in files])
    name = f"{folder.absolute().name}-{split}" if splits else folder.absolute().name
    class_names = [path.name for path in classes]
    return build_dataset([top], name=name or "images", images=_read(paths), labels=labels, class_names=class_names)


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]


def _visible(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)


def _read(paths: Sequence[Path]) -> NDArray[np.uint8]:
    """All images ``(N, C, H, W)`` uint8; sizes and modes are compared before the first one is decoded."""
    size, grey = (0, 0), True
    for path in paths:
        with opened(path) as image:
            if path == paths[0]:
                size = image.size
            if image.size != size:
                got = f"{image.width} x {image.height} pixels"
                expected = f"{size[0]} x {size[1]} as in {paths[0]}"
                raise unusable(path, got, expected, "resize the images to one size")
            if image.mode in _DEEP_MODES or image.mode.startswith("I;"):
                then = "convert it to 8 bits, or save the values in [0, 1] as .npz"
                raise unusable(path, f"pixels of mode {image.mode}", "8 bits a channel", then)
            grey = grey and image.mode in _GREY_MODES
    images = np.empty((len(paths), 1 if grey else 3, size[1], size[0]), dtype=np.uint8)
    for position, path in enumerate(paths):
        with opened(path) as image:
            # Palettes go by way of RGBA, because Pillow warns of transparency that would be lost otherwise.
            direct = image.convert("RGBA") if image.mode in ("P", "PA") else image
            pixels = np.asarray(direct.convert("L" if grey else "RGB"))
        images[position] = pixels[None] if grey else np.moveaxis(pixels, -1, 0)
    return images


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Open an image, which is decoded when its pixels are first needed; every error inside names the file."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError('A folder of images needs Pillow: pip install "robust-ext[cli]"') from error
    try:
        with warnings.catch_warnings():
            # Pillow only warns of files that are small on disk and huge in memory, up to twice its limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as image:
                yield image
    except DataError:
        raise
    except Exception as error:
        # Decoders raise errors of many kinds for damaged data.
        got, expected = f"an error while decoding ({error})", f"a whole image ({', '.join(_FORMATS)})"
        raise unusable(path, got, expected, "replace the file or remove it") from error
