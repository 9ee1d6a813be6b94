"""CIFAR-10 and CIFAR-100, in the binary and in the python version of https://www.cs.toronto.edu/~kriz/cifar.html."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from robust_ext.datasets.base import Dataset
from robust_ext.datasets.cifar_pickle import read_batch
from robust_ext.datasets.files import DOWNLOAD_AGAIN, build_dataset, find_files, reading, unusable

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
SHAPE = (3, 32, 32)

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FINE_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(_FINE_NAMES.split())


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How the files of one of the two datasets are laid out.

    Args:
        name: The dataset, and where users put it, besides the names the archives unpack to.
        binary_folder: What the archive of the binary version unpacks to.
        python_folder: What the archive of the python version unpacks to.
        files: File names without ``.bin``, by split.
        label_bytes: Bytes before the pixels of a binary record; the last of them is the label.
        label_key: Key of the labels in the python version.
        class_names: Names of the classes.
    """

    name: str
    binary_folder: str
    python_folder: str
    files: dict[str, tuple[str, ...]]
    label_bytes: int
    label_key: str
    class_names: tuple[str, ...]


_CIFAR10 = _Layout(
    name="cifar10",
    binary_folder="cifar-10-batches-bin",
    python_folder="cifar-10-batches-py",
    files={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    label_bytes=1,
    label_key="labels",
    class_names=CIFAR10_CLASSES,
)
_CIFAR100 = _Layout(
    name="cifar100",
    binary_folder="cifar-100-binary",
    python_folder="cifar-100-python",
    files={"train": ("train",), "test": ("test",)},
    label_bytes=2,
    label_key="fine_labels",
    class_names=CIFAR100_CLASSES,
)


def load_cifar10(root: Path, split: str) -> Dataset:
    """CIFAR-10, ``(N, 3, 32, 32)`` uint8, from ``root`` or ``root/cifar10`` or the folder an archive unpacks to there.

    The binary version is looked for before the python version.

    Args:
        root: Folder to look in.
        split: ``"train"`` or ``"test"``.

    Raises:
        DataError: Files are missing or not what their names promise.
    """
    return _load(_CIFAR10, root, split)


def load_cifar100(root: Path, split: str) -> Dataset:
    """CIFAR-100 with its 100 fine labels; as :func:`load_cifar10`."""
    return _load(_CIFAR100, root, split)


def _load(layout: _Layout, root: Path, split: str) -> Dataset:
    python = [(name,) for name in layout.files[split]]
    binary = [(f"{name}.bin",) for name in layout.files[split]]
    places = [
        place
        for base in (root / layout.name, root)
        for place in (
            (base / layout.binary_folder, binary),
            (base / layout.python_folder, python),
            (base, binary),
            (base, python),
        )
    ]
    files = find_files(places, data=f"{layout.name} ({split})", source=SOURCE)
    parts = [
        build_dataset(
            [path], name=f"{layout.name}-{split}", images=images, labels=labels, class_names=layout.class_names
        )
        for path in files
        for images, labels in [_read_records(path, layout) if path.suffix == ".bin" else _read_pickle(path, layout)]
    ]
    if len(parts) == 1:
        return parts[0]
    return Dataset(
        name=parts[0].name,
        images=np.concatenate([part.images for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        class_names=layout.class_names,
    )


def _read_records(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    size = layout.label_bytes + math.prod(SHAPE)
    with reading(path):
        content = np.fromfile(path, dtype=np.uint8)
    if content.size == 0 or content.size % size:
        expected = f"a multiple of {size}, the size of a record of {layout.name}"
        raise unusable(path, got=f"{content.size} bytes", expected=expected, then=DOWNLOAD_AGAIN)
    records = content.reshape(-1, size)
    return records[:, layout.label_bytes :].reshape(-1, *SHAPE), records[:, layout.label_bytes - 1]


def _read_pickle(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rows, labels = read_batch(path, label_key=layout.label_key)
    return rows.reshape(-1, *SHAPE), labels
