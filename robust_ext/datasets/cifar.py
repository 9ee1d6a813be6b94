"""CIFAR-10 and CIFAR-100, in the binary and in the python version of https://www.cs.toronto.edu/~kriz/cifar.html.

Batches of the python version are pickles, programs that call any function they name. The reader here offers none: four
names that the batches use get stand-ins, which copy texts and bytes, and all other names are refused. Numpy's own
functions would take the layout of an array from the file, with types whose bytes are pointers.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from robust_ext.datasets.base import Dataset, build_dataset, find_files, reading, unusable

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
SHAPE = (3, 32, 32)
_PIXELS = math.prod(SHAPE)
_NDARRAY = "numpy.ndarray"

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
_EXPECTED = "a CIFAR batch: a pickled dict of arrays of unsigned bytes, lists and texts"


def load_cifar10(root: Path, split: str) -> Dataset:
    """CIFAR-10, ``(N, 3, 32, 32)`` uint8, from ``root`` or ``root/cifar10`` or the folder an archive unpacks to there.

    The binary version is looked for before the python version.
    """
    files = ["test_batch"] if split == "test" else [f"data_batch_{number}" for number in range(1, 6)]
    folders = ("cifar-10-batches-bin", "cifar-10-batches-py")
    return _load("cifar10", root, split, files, folders, CIFAR10_CLASSES, label_key="labels", label_bytes=1)


def load_cifar100(root: Path, split: str) -> Dataset:
    """CIFAR-100 with its 100 fine labels; as :func:`load_cifar10`."""
    folders = ("cifar-100-binary", "cifar-100-python")
    return _load("cifar100", root, split, [split], folders, CIFAR100_CLASSES, label_key="fine_labels", label_bytes=2)


def _load(
    data: str,
    root: Path,
    split: str,
    files: list[str],
    folders: tuple[str, str],
    classes: tuple[str, ...],
    *,
    label_key: str,
    label_bytes: int,
) -> Dataset:
    versions = ([(f"{name}.bin",) for name in files], [(name,) for name in files])
    places = []
    for base in (root / data, root):
        unpacked = [(base / folder, names) for folder, names in zip(folders, versions, strict=True)]
        places += [*unpacked, *((base, names) for names in versions)]
    parts, name = [], f"{data}-{split}"
    for path in find_files(places, data=f"{data} ({split})", source=SOURCE):
        read = _read_records(path, data, label_bytes) if path.suffix == ".bin" else read_batch(path, label_key)
        images = read[0].reshape(-1, *SHAPE)
        parts.append(build_dataset([path], name=name, images=images, labels=read[1], class_names=classes))
    images, labels = np.concatenate([part.images for part in parts]), np.concatenate([part.labels for part in parts])
    return Dataset(name=name, images=images, labels=labels, class_names=classes)


def _read_records(path: Path, data: str, label_bytes: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Return rows and labels of binary records; the last byte before the pixels is the label."""
    size = label_bytes + _PIXELS
    with reading(path):
        content = np.fromfile(path, dtype=np.uint8)
    if content.size == 0 or content.size % size:
        raise unusable(path, f"{content.size} bytes", f"a multiple of {size}, the size of a record of {data}")
    records = content.reshape(-1, size)
    return records[:, label_bytes:], records[:, label_bytes - 1]


class _RefusedError(pickle.UnpicklingError):
    """A pickle refers to something that no CIFAR batch needs."""


class _Bytes:
    """A stand-in for ``numpy.dtype`` of unsigned bytes; a pickle sets byte order and flags on it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """A stand-in for an array, which checks and stores what its pickle sets."""

    __slots__ = ("values",)
    values: NDArray[np.uint8]

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _RefusedError("an array in an unknown layout")
        _, shape, dtype, fortran, data = state
        sizes = isinstance(shape, tuple) and all(isinstance(size, int) and size >= 0 for size in shape)
        if not (sizes and isinstance(dtype, _Bytes) and isinstance(data, bytes) and len(data) == math.prod(shape)):
            raise _RefusedError("an array whose shape, type and data do not fit together")
        self.values = np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _MakeArray:
    """A stand-in for numpy's ``_reconstruct``."""

    __slots__ = ()

    def __call__(self, kind: object, shape: object, code: object) -> _Array:
        if kind != _NDARRAY:
            raise _RefusedError("an array of an unknown kind")
        return _Array()


class _MakeBytes:
    """A stand-in for ``numpy.dtype``."""

    __slots__ = ()

    def __call__(self, code: object, *flags: object) -> _Bytes:
        if code not in ("u1", b"u1"):
            raise _RefusedError("an array of other values than unsigned bytes")
        return _Bytes()


class _Encode:
    """A stand-in for ``_codecs.encode``, as which Python 3 writes bytes for Python 2."""

    __slots__ = ()

    def __call__(self, text: object, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise _RefusedError("a text in an unknown encoding")
        return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _MakeArray(),
    ("numpy._core.multiarray", "_reconstruct"): _MakeArray(),
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _MakeBytes(),
    ("_codecs", "encode"): _Encode(),
}


class _BatchUnpickler(pickle.Unpickler):
    """An unpickler of the stand-ins alone.

    A pickle reaches objects outside itself through ``find_class`` only. Here it returns immutable objects (empty slots,
    no dict), so a pickle cannot leave attributes behind either.
    """

    def find_class(self, module_name: str, global_name: str, /) -> object:
        try:
            return _STAND_INS[module_name, global_name]
        except KeyError:
            raise _RefusedError(f"a pickle that refers to {module_name}.{global_name}") from None

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise _RefusedError("a pickle that refers to objects outside itself")


def _check_memo(content: bytes) -> None:
    """Refuse positions in the pickle's memo that no writer reaches.

    The memo is a table as long as the highest position in it: one damaged byte can reserve gigabytes. Writers count
    up from 0 or 1, at most once an opcode. ``genops`` only takes the pickle apart and runs nothing of it.
    """
    for count, (opcode, position, _) in enumerate(pickletools.genops(content)):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and position is not None and position > count:
            raise ValueError(f"position {position} in the memo of a pickle that has used at most {count}")


def read_batch(path: Path, label_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return rows ``(N, 3072)`` uint8 and labels ``(N,)`` int64 of one pickled CIFAR batch."""
    with reading(path):
        content = path.read_bytes()
    try:
        _check_memo(content)
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
    except _RefusedError as error:
        then = f"nothing of it was run; use files from {SOURCE}"
        raise unusable(path, str(error), _EXPECTED, then) from error
    except Exception as error:
        # A damaged pickle can cause any error in the unpickler and the stand-ins.
        raise unusable(path, f"damaged data ({error})", _EXPECTED) from error
    if not isinstance(batch, dict):
        raise unusable(path, f"a pickled {type(batch).__name__}", _EXPECTED)
    # Written by Python 2 and read as bytes, or written again by Python 3 as texts.
    entries = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    data, labels = entries.get("data"), entries.get(label_key)
    rows = getattr(data, "values", None) if isinstance(data, _Array) else None
    if rows is None or rows.ndim != 2 or rows.shape[1] != _PIXELS:
        got = "no 'data'" if data is None else "'data' of another shape or type"
        raise unusable(path, got, f"'data', (N, {_PIXELS}) unsigned bytes")
    # Labels are at most 99: the limit only keeps numpy from an overflow.
    if not isinstance(labels, list) or not all(isinstance(label, int) and abs(label) < 2**31 for label in labels):
        got = f"no {label_key!r}" if labels is None else f"{label_key!r} of another type"
        raise unusable(path, got, f"{label_key!r}, a list of integers")
    return rows, np.array(labels, dtype=np.int64)
