"""CIFAR-10 and CIFAR-100, in the binary and in the python version of https://www.cs.toronto.edu/~kriz/cifar.html."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from robust_ext.datasets.base import Dataset
from robust_ext.datasets.cifar_pickle import read_batch
from robust_ext.datasets.files import build_dataset, find_files, reading, unusable

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

    The folders are what the archives of both versions unpack to, ``files`` the names of each split without ``.bin``.
    The last of the ``label_bytes`` before the pixels of a binary record is the label.
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
    """
    return _load(_CIFAR10, root, split)


def load_cifar100(root: Path, split: str) -> Dataset:
    """CIFAR-100 with its 100 fine labels; as :func:`load_cifar10`."""
    return _load(_CIFAR100, root, split)


def _load(layout: _Layout, root: Path, split: str) -> Dataset:
    python = [(name,) for name in layout.files[split]]
    binary = [(f"{name}.bin",) for name in layout.files[split]]
    places: list[tuple[Path, list[tuple[str]]]] = []
    for base in (root / layout.name, root):
        places += [(base / layout.binary_folder, binary), (base / layout.python_folder, python)]
        places += [(base, binary), (base, python)]
    parts: list[Dataset] = []
    name, classes = f"{layout.name}-{split}", layout.class_names
    for path in find_files(places, data=f"{layout.name} ({split})", source=SOURCE):
        rows, labels = _read_records(path, layout) if path.suffix == ".bin" else read_batch(path, layout.label_key)
        images = rows.reshape(-1, *SHAPE)
        parts.append(build_dataset([path], name=name, images=images, labels=labels, class_names=classes))
    whole, targets = np.concatenate([part.images for part in parts]), np.concatenate([part.labels for part in parts])
    return Dataset(name=name, images=whole, labels=targets, class_names=classes)


def _read_records(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    size = layout.label_bytes + math.prod(SHAPE)
    with reading(path):
        content = np.fromfile(path, dtype=np.uint8)
    if content.size == 0 or content.size % size:
        raise unusable(path, f"{content.size} bytes", f"a multiple of {size}, the size of a record of {layout.name}")
    records = content.reshape(-1, size)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1]
