"""Reads the "python version" of CIFAR, whose batches are pickles, without letting a pickle do anything.

A pickle is a program: it may call whatever its reader finds for it by name. This reader finds nothing. For the four
names that the batches use it returns stand-ins of its own, which copy texts and bytes and accept nothing else, and it
refuses all other names. Not even numpy's own functions are handed out: they would take the layout of an array from
the file, with types of which numpy believes that the bytes are pointers.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from robust_ext.datasets.files import reading, unusable

_NDARRAY = "numpy.ndarray"
_MEMO_OPCODES = ("PUT", "BINPUT", "LONG_BINPUT")
_EXPECTED = "a CIFAR batch: a pickled dict of arrays of unsigned bytes, lists and texts"


class _RefusedError(pickle.UnpicklingError):
    """The pickle refers to something that no CIFAR batch needs."""


class _Bytes:
    """Stands in for ``numpy.dtype`` of unsigned bytes; what the pickle sets on it is byte order and flags."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stands in for an array: what its pickle sets is checked and kept."""

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
    """Stands in for numpy's ``_reconstruct``."""

    __slots__ = ()

    def __call__(self, kind: object, shape: object, code: object) -> _Array:
        if kind != _NDARRAY:
            raise _RefusedError("an array of an unknown kind")
        return _Array()


class _MakeBytes:
    """Stands in for ``numpy.dtype``."""

    __slots__ = ()

    def __call__(self, code: object, *flags: object) -> _Bytes:
        if code not in ("u1", b"u1"):
            raise _RefusedError("an array of other values than unsigned bytes")
        return _Bytes()


class _Encode:
    """Stands in for ``_codecs.encode``, as which Python 3 writes bytes for Python 2."""

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
    """An unpickler for which only the stand-ins exist.

    ``find_class`` is the only way by which a pickle reaches anything outside itself. All that it returns here is
    immutable (empty slots, no dict), so that a pickle cannot leave anything behind by setting attributes either.
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
        if opcode.name in _MEMO_OPCODES and position is not None and position > count:
            raise ValueError(f"position {position} in the memo of a pickle that has used at most {count}")


def read_batch(path: Path, label_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Rows ``(N, 3072)`` uint8 and labels ``(N,)`` int64 of one pickled CIFAR batch."""
    with reading(path):
        content = path.read_bytes()
    try:
        _check_memo(content)
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
    except _RefusedError as error:
        then = "nothing of it was run; use files from https://www.cs.toronto.edu/~kriz/cifar.html"
        raise unusable(path, str(error), _EXPECTED, then) from error
    except Exception as error:
        # A damaged pickle runs into any error the reader's own checks and our stand-ins can raise.
        raise unusable(path, f"damaged data ({error})", _EXPECTED) from error
    if not isinstance(batch, dict):
        raise unusable(path, f"a pickled {type(batch).__name__}", _EXPECTED)
    # Written by Python 2 and read as bytes, or written again by Python 3 as texts.
    entries = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    data, labels = entries.get("data"), entries.get(label_key)
    rows = getattr(data, "values", None) if isinstance(data, _Array) else None
    if rows is None or rows.ndim != 2 or rows.shape[1] != 3072:
        got = "no 'data'" if data is None else "'data' of another shape or type"
        raise unusable(path, got, "'data', (N, 3072) unsigned bytes")
    # Labels are at most 99: the limit only keeps numpy from an overflow.
    if not isinstance(labels, list) or not all(isinstance(label, int) and abs(label) < 2**31 for label in labels):
        got = f"no {label_key!r}" if labels is None else f"{label_key!r} of another type"
        raise unusable(path, got, f"{label_key!r}, a list of integers")
    return rows, np.array(labels, dtype=np.int64)
