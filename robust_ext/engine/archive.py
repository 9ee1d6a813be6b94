"""Arrays and single values in files of their own, each with a checksum of its content, its name and its run."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from robust_ext.core.arrays import ArrayArchive, UnreadableArraysError
from robust_ext.core.errors import RunFolderError
from robust_ext.core.files import replace_file
from robust_ext.engine.chain import DIGITS, checksum, damaged, seal, to_text, unseal

# Bytes that are compressed to see whether that is worth while, and what has to be gained.
_TRIED, _GAIN = 2**14, 0.75


def write_arrays(path: Path, start: str, arrays: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write an ``.npz`` file whose checksum is the comment that ends zip archives; numpy reads it like any other."""
    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            npy.write_array(entry := io.BytesIO(), np.asanyarray(array), allow_pickle=False)
            # Where nothing is to be gained, as with noise, compressing takes longer than all the rest.
            start_of = entry.getvalue()[:_TRIED]
            kind = ZIP_DEFLATED if len(zlib.compress(start_of, 1)) < _GAIN * len(start_of) else ZIP_STORED
            archive.writestr(ZipInfo(f"{name}.npy"), entry.getvalue(), kind, compresslevel=1)
    # The last two bytes of an archive without a comment are the comment's length.
    content = file.getvalue()[:-2] + DIGITS.to_bytes(2, "little")
    whole = content + checksum(start, path.name, content).encode()
    replace_file(path, whole, error=RunFolderError, sync=sync)


def checksum_of(path: Path) -> bytes:
    """The checksum that a file of :func:`write_arrays` states."""
    try:
        with path.open("rb") as file:
            file.seek(-DIGITS, os.SEEK_END)
            return file.read()
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror or error})") from error


def read_arrays(path: Path, start: str) -> dict[str, NDArray[Any]]:
    """The arrays of a file that :func:`write_arrays` wrote for the same run; RunFolderError where it is damaged."""
    content = _content(path)
    if checksum(start, path.name, content[:-DIGITS]).encode() != content[-DIGITS:]:
        raise damaged(path, "does not match its checksum")
    try:
        archive = ArrayArchive(io.BytesIO(content))
        return archive.read(*archive.names)
    except UnreadableArraysError as error:
        raise damaged(path, f"holds {error}") from error


def write_value(path: Path, start: str, value: object) -> Any:
    """Write a JSON value; returns it as it will be read."""
    line, _ = seal(to_text({"value": value}), checksum(start, path.name))
    replace_file(path, line, error=RunFolderError)
    return json.loads(line)["value"]


def read_value(path: Path, start: str) -> Any:
    """The value that :func:`write_value` wrote for the same run; RunFolderError where it is damaged."""
    found = unseal(_content(path).removesuffix(b"\n"), checksum(start, path.name))
    if found is None:
        raise damaged(path, "does not match its checksum")
    return found[0]["value"]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read ({error.strerror or error})") from error
