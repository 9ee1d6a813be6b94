"""Arrays in ``.npz`` files, checked by what the file declares before anything is unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any
from zipfile import ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

# An archive may unpack to this many bytes, or to so many times its own size where that is more.
MOST_BYTES, MOST_RATIO = 256 * 2**20, 100


class UnreadableArraysError(ValueError):
    """An archive that is damaged, too large when unpacked, or holds objects; its text follows the file's name."""


class ArrayArchive:
    """The arrays of an open ``.npz`` file by name; nothing is unpickled, and nothing unpacked before it is wanted."""

    def __init__(self, file: IO[bytes]) -> None:
        if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
            raise UnreadableArraysError("a single array")
        self._packed = file.seek(0, 2)
        with _readable():
            self._archive = ZipFile(file)
        self._entries = {
            entry.filename.removesuffix(".npy"): entry
            for entry in self._archive.infolist()
            if entry.filename.endswith(".npy")
        }

    @property
    def names(self) -> list[str]:
        """Of the arrays."""
        return list(self._entries)

    def read(self, *names: str) -> dict[str, NDArray[Any]]:
        """Arrays by name, once all of them were found to be numbers or texts of a size that can be meant."""
        wanted = [self._entries[name] for name in names]
        total = sum(entry.file_size for entry in wanted)
        if total > max(MOST_BYTES, MOST_RATIO * self._packed):
            raise UnreadableArraysError(
                f"{self._packed:,} bytes that unpack to {total:,}, more than {MOST_BYTES:,} and more than {MOST_RATIO} "
                "times as many (large arrays that are meant are to be saved without compression)"
            )
        with _readable():
            for entry in wanted:
                self._check(entry)
            return {name: self._read(entry) for name, entry in zip(names, wanted, strict=True)}

    def _check(self, entry: ZipInfo) -> None:
        """Raise where the header of an array declares objects, or another size than its entry has."""
        with self._archive.open(entry) as stream:
            version = npy.read_magic(stream)
            reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, kind = reader(stream)
            if kind.hasobject:
                raise UnreadableArraysError(
                    f"{entry.filename} with Python objects, which are never read (allow_pickle would run their code)"
                )
            declared = int(np.prod(shape, dtype=object)) * kind.itemsize
            if declared != entry.file_size - stream.tell():
                held = entry.file_size - stream.tell()
                raise UnreadableArraysError(f"{entry.filename} of {held} bytes where shape {shape} needs {declared}")

    def _read(self, entry: ZipInfo) -> NDArray[Any]:
        with self._archive.open(entry) as stream:
            found: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
            # The end of the entry, where its checksum is compared.
            stream.read(1)
            return found


@contextmanager
def _readable() -> Iterator[None]:
    """Errors of whatever kind a damaged archive causes as one."""
    try:
        yield
    except UnreadableArraysError:
        raise
    except Exception as error:
        # zipfile, zlib and numpy's header parser raise a dozen kinds of errors for damaged data.
        raise UnreadableArraysError(f"an error while reading ({type(error).__name__}: {error})") from error
