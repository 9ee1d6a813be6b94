"""Helpers of the loaders of all formats: find files, read them, and report errors that name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.datasets.base import Dataset

DOWNLOAD_AGAIN = "the file is damaged or another one: download it again"


def unusable(path: Path | str, got: str, expected: str, then: str = DOWNLOAD_AGAIN) -> DataError:
    """Return an error about one file: its content, the expected content, and the next step."""
    return DataError(f"{path}: got {got}, expected {expected}; {then}")


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Inside the block, turn errors of the operating system into a ``DataError`` that names the file."""
    try:
        yield
    except OSError as error:
        got = f"an error while reading ({error.strerror or error})"
        raise unusable(path, got, "readable data", "check path and permissions") from error


def find_files(places: Sequence[tuple[Path, Sequence[Sequence[str]]]], *, data: str, source: str) -> list[Path]:
    """Find files that belong together, in the first folder that holds all of them.

    ``places`` are folders with the files wanted there, each file by its alternative names. Where no folder holds all,
    a :class:`DataError` names ``data``, what is missing, where it was looked for, and the ``source`` of the files.
    """
    looked: list[Path] = []
    incomplete: Path | None = None
    for folder, wanted in places:
        found = [next((folder / name for name in names if (folder / name).is_file()), None) for names in wanted]
        paths = [path for path in found if path is not None]
        if len(paths) == len(wanted):
            return paths
        missing = folder / wanted[found.index(None)][0]
        looked.append(missing)
        if paths and incomplete is None:
            incomplete = missing
    if incomplete is not None:
        expected = f"it next to the other files of {data}"
        raise unusable(incomplete, "no such file", expected, f"add it; download it from {source}")
    raise DataError(
        f"{data}: no files found, looked for {', '.join(map(str, looked))} (and their other usual names); name the "
        f"folder that holds them as root (--data-root); download them from {source}"
    )


def build_dataset(
    files: Sequence[Path],
    *,
    name: str,
    images: NDArray[Any],
    labels: NDArray[Any],
    class_names: Sequence[str],
    then: str = DOWNLOAD_AGAIN,
) -> Dataset:
    """Make a dataset from the content of files; a :class:`DataError` names the files and the next step ``then``."""
    try:
        return Dataset(name=name, images=images, labels=labels, class_names=tuple(class_names))
    except InvalidArgumentError as error:
        raise DataError(f"{', '.join(map(str, files))}: {error}; {then}") from error
