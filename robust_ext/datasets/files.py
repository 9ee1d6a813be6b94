"""What the loaders of all formats share: finding files, reading them, turning what is wrong into one error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.datasets.base import Dataset

DOWNLOAD_AGAIN = "the file is damaged or another one: download it again"


def unusable(path: Path | str, *, got: str, expected: str, then: str) -> DataError:
    """An error about one file.

    Args:
        path: The file.
        got: What it holds.
        expected: What was expected of it.
        then: What the user can do next.

    Example:
        >>> raise unusable("a.gz", got="12 bytes", expected="16 bytes", then="download it again")
        Traceback (most recent call last):
        ...
        robust_ext.core.errors.DataError: a.gz: got 12 bytes, expected 16 bytes; download it again
    """
    return DataError(f"{path}: got {got}, expected {expected}; {then}")


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn errors of the operating system inside the block into a ``DataError`` that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise unusable(
            path, got=f"an error while reading ({reason})", expected="readable data", then="check path and permissions"
        ) from error


def find_files(places: Sequence[tuple[Path, Sequence[Sequence[str]]]], *, data: str, source: str) -> list[Path]:
    """Files that belong together, from the first folder that holds all of them.

    Args:
        places: Folders to look in, each with the files wanted there; a file is given by its alternative names.
        data: What the files are, for the error.
        source: Where they can be had.

    Returns:
        One path for each wanted file, in order.

    Raises:
        DataError: No folder holds all; names what is missing and where it was looked for.
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
        then = f"add it; it can be had from {source}"
        raise unusable(incomplete, got="no such file", expected=f"it beside the other files of {data}", then=then)
    raise DataError(
        f"{data}: no files found, looked for {', '.join(map(str, looked))} (and their other usual names); name the "
        f"folder that holds them as root (--data-root); they can be had from {source}"
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
    """A dataset of what the files hold.

    Raises:
        DataError: What they hold makes no dataset; names the files, and ``then`` as what to do.
    """
    try:
        return Dataset(name=name, images=images, labels=labels, class_names=tuple(class_names))
    except InvalidArgumentError as error:
        raise DataError(f"{', '.join(map(str, files))}: {error}; {then}") from error
