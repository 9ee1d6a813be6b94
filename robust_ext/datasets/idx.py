"""MNIST and Fashion-MNIST in the idx format of http://yann.lecun.com/exdb/mnist, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from robust_ext.datasets.base import Dataset, build_dataset, find_files, reading, unusable

MNIST_CLASSES = tuple("0123456789")
_FASHION = "T-shirt/top, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot"
FASHION_CLASSES = tuple(_FASHION.split(", "))

_UBYTE = 0x08
_OTHER_TYPES = {0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}
_LARGEST_PACKED = 1 << 30
"""Bytes that a gzipped file may hold, 20 times those of MNIST: a small file can unpack to fill any memory."""


def load_mnist(root: Path, split: str) -> Dataset:
    """MNIST from ``root``, ``root/mnist``, ``root/MNIST`` or their folder ``raw``, ``(N, 1, 28, 28)`` uint8."""
    source = "https://ossci-datasets.s3.amazonaws.com/mnist"
    return _load("mnist", root, split, folders=("mnist", "MNIST"), class_names=MNIST_CLASSES, source=source)


def load_fashion_mnist(root: Path, split: str) -> Dataset:
    """Fashion-MNIST; as :func:`load_mnist`, in folders ``fashion-mnist``, ``fashion_mnist`` and ``FashionMNIST``."""
    folders = ("fashion-mnist", "fashion_mnist", "FashionMNIST")
    source = "https://github.com/zalandoresearch/fashion-mnist"
    return _load("fashion-mnist", root, split, folders=folders, class_names=FASHION_CLASSES, source=source)


def _load(
    name: str, root: Path, split: str, *, folders: tuple[str, ...], class_names: tuple[str, ...], source: str
) -> Dataset:
    prefix = "train" if split == "train" else "t10k"
    wanted = [
        [f"{prefix}-{stem}{end}" for end in ("", ".gz") for stem in (f"{kind}-{idx}", f"{kind}.{idx}")]
        for kind, idx in (("images", "idx3-ubyte"), ("labels", "idx1-ubyte"))
    ]
    # The root itself comes last: it may hold the other of the two datasets, whose files have the same names.
    places = [place for folder in (*folders, "") for place in (root / folder, root / folder / "raw")]
    files = find_files([(place, wanted) for place in places], data=f"{name} ({split})", source=source)
    images, labels = read_idx(files[0], dimensions=3), read_idx(files[1], dimensions=1)
    return build_dataset(files, name=f"{name}-{split}", images=images[:, None], labels=labels, class_names=class_names)


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """The read-only array, of as many ``dimensions``, in an idx file of unsigned bytes.

    Whether the file is gzipped follows from its first bytes: browsers unpack downloads and keep the name.
    """
    with reading(path), path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not packed:
            return _parse(file, path, dimensions)
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _parse(unpacked, path, dimensions)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise unusable(path, f"damaged data ({error})", "a whole gzip file") from error


def _parse(file: IO[bytes] | gzip.GzipFile, path: Path, dimensions: int) -> NDArray[np.uint8]:
    header = file.read(4 + 4 * dimensions)
    expected = f"an idx file of unsigned bytes with {dimensions} dimension(s)"
    if len(header) < 4:
        raise unusable(path, f"{len(header)} bytes", expected)
    zeros, type_code, stated = struct.unpack(">HBB", header[:4])
    if zeros == 0 and type_code in _OTHER_TYPES:
        then = "convert the values to unsigned bytes, or save the arrays as .npz"
        raise unusable(path, f"an idx file of {_OTHER_TYPES[type_code]}", expected, then)
    if zeros != 0 or type_code != _UBYTE:
        raise unusable(path, f"first bytes {header[:4].hex(' ')}", expected)
    if stated != dimensions:
        then = "check that images (3 dimensions) and labels (1 dimension) are not exchanged"
        raise unusable(path, f"an idx file with {stated} dimension(s)", expected, then)
    if len(header) < 4 + 4 * dimensions:
        raise unusable(path, f"{len(header)} bytes", f"a header of {4 + 4 * dimensions}")
    shape = struct.unpack(f">{dimensions}I", header[4:])
    size = math.prod(shape)
    if size > _LARGEST_PACKED and isinstance(file, gzip.GzipFile):
        got = f"a header for {size:,} bytes of values, of shape {shape}"
        expected = f"at most {_LARGEST_PACKED:,} in a gzipped file"
        raise unusable(path, got, expected, "unpack it with gunzip first if the file is really that large")
    # The size comes from the file: a damaged header must not reserve memory that no data fills.
    values = file.read(size + 1) if isinstance(file, gzip.GzipFile) else file.read()
    if len(values) != size:
        got = f"{len(values)} bytes of values" if len(values) < size else f"more than {size} bytes of values"
        raise unusable(path, got, f"{size}, for the stated shape {shape}")
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)
