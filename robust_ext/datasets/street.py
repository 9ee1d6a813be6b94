"""Street data: traffic signs (GTSRB) and house numbers (SVHN).

GTSRB has images of many sizes with tables of labels, SVHN arrays in MATLAB files of version 5, which hold no code.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robust_ext.datasets.base import Dataset, build_dataset, find_files, reading, unusable
from robust_ext.datasets.idx import MNIST_CLASSES
from robust_ext.datasets.image_folder import opened

SIDE = 32
"""Height and width of the images."""
_GTSRB, _SVHN = "https://benchmark.ini.rub.de", "http://ufldl.stanford.edu/housenumbers"
_SIGNS = 43
_FOLDERS = ("Final_Test/Images", "GTSRB/Final_Test/Images", "")
# Three times what the largest file of SVHN holds: a small file can unpack to fill any memory.
_LARGEST = 5 << 30


def load_gtsrb(root: Path, split: str) -> Dataset:
    """Traffic signs of 43 classes from ``root``, ``root/gtsrb`` or their folder ``GTSRB``, ``(N, 3, 32, 32)`` uint8.

    Whole images, borders included, are resized (bilinear). Each class has a folder in ``Final_Training/Images`` or
    ``Training``, with a table of its images; those for tests are in ``Final_Test/Images`` and their table
    ``GT-final_test.csv`` next to them, or where the archives are unpacked. Classes are called by their numbers.
    """
    bases = [root / name for name in ("gtsrb/GTSRB", "gtsrb", "GTSRB", "")]
    about = {"data": f"gtsrb ({split})", "source": _GTSRB}
    if split == "train":
        wanted = [(f"{number:05}/GT-{number:05}.csv",) for number in range(_SIGNS)]
        places = [base / folder for base in bases for folder in ("Final_Training/Images", "Training")]
        tables = find_files([(place, wanted) for place in places], **about)
        entries = [entry for table in tables for entry in _entries(table, [table.parent])]
    else:
        names = [(f"{_FOLDERS[0]}/GT-final_test.csv", "GT-final_test.csv")]
        tables = find_files([(base, names) for base in bases], **about)
        entries = _entries(tables[0], [tables[0].parent / folder for folder in _FOLDERS])
    images, labels = _resized([path for path, _ in entries]), np.array([label for _, label in entries], dtype=np.int64)
    classes = [str(number) for number in range(_SIGNS)]
    return build_dataset(tables, name=f"gtsrb-{split}", images=images, labels=labels, class_names=classes)


def _entries(table: Path, folders: Sequence[Path]) -> list[tuple[Path, int]]:
    """Return files and labels of a table, in its order; files lie in the first folder that has the first one."""
    expected = "lines Filename;...;ClassId with names of images beside the table and classes 0 to 42"
    with reading(table), table.open(encoding="latin1", newline="") as file:
        lines = list(csv.DictReader(file, delimiter=";"))
    found = [(line.get("Filename") or "", line.get("ClassId") or "") for line in lines]
    wrong = next((one for one in found if Path(one[0]).name != one[0] or not one[1].isdecimal()), None)
    if not found or wrong is not None:
        raise unusable(table, "no lines" if wrong is None else f"a line {wrong}", expected)
    folder = next((one for one in folders if (one / found[0][0]).is_file()), folders[-1])
    return [(folder / name, int(label)) for name, label in found]


def _resized(paths: Sequence[Path]) -> NDArray[np.uint8]:
    images = np.empty((len(paths), 3, SIDE, SIDE), dtype=np.uint8)
    for position, path in enumerate(paths):
        with opened(path) as image:
            # 2: bilinear.
            images[position] = np.moveaxis(np.asarray(image.convert("RGB").resize((SIDE, SIDE), 2)), -1, 0)
    return images


def load_svhn(root: Path, split: str) -> Dataset:
    """Cropped house numbers from ``{split}_32x32.mat`` in ``root`` or ``root/svhn``, ``(N, 3, 32, 32)`` uint8.

    In the file the digit 0 has the label 10.
    """
    places = [(root / folder, [(f"{split}_32x32.mat",)]) for folder in ("svhn", "SVHN", "")]
    (path,) = find_files(places, data=f"svhn ({split})", source=_SVHN)
    images, labels = _arrays(path)
    images = np.ascontiguousarray(images.transpose(3, 2, 0, 1))
    labels = labels.ravel().astype(np.int64) % 10
    return build_dataset([path], name=f"svhn-{split}", images=images, labels=labels, class_names=MNIST_CLASSES)


def _arrays(path: Path) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Return images ``X`` ``(32, 32, 3, N)`` and labels ``y`` ``(N, 1)`` of 1 to 10, whose sizes are compared first."""
    from scipy.io import loadmat, whosmat

    expected = f"arrays X ({SIDE}, {SIDE}, 3, N) of unsigned bytes and y (N, 1) of 1 to 10"
    with reading(path):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                shapes = {name: shape for name, shape, _ in whosmat(str(path), appendmat=False)}
                count = shapes.get("y", (0,))[0]
                shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "no arrays"
                fits = shapes.get("X") == (SIDE, SIDE, 3, count) and shapes["y"] == (count, 1)
                fits = fits and 3 * SIDE**2 * count <= _LARGEST
                arrays = loadmat(str(path), appendmat=False, variable_names=("X", "y")) if fits else {}
        # Damaged files raise errors of many kinds.
        except Exception as error:
            got = f"an error while reading ({type(error).__name__}: {error})"
            raise unusable(path, got, expected) from error
    if not arrays:
        raise unusable(path, shown, expected)
    images, labels = arrays["X"], arrays["y"]
    if images.dtype != np.uint8 or labels.dtype.kind not in "iu" or not ((labels >= 1) & (labels <= 10)).all():
        raise unusable(path, f"X of {images.dtype}, y of {labels.dtype}, or other labels", expected)
    return images, labels
