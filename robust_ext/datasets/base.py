"""Labelled images or tables in memory or in a memory map, and the files that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.validation import check_bounds, check_choice, check_integer


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset:
    """Labelled images, or the rows of a table.

    Args:
        name: What reports call it.
        images: ``(N, C, H, W)``, uint8 of 0..255 or float32 of 0..1; or a table ``(N, D)``, float32 in units of its
            own. Kept as they are (a memory map stays one) and read-only from here.
        labels: Integers ``(N,)`` of at least 0 and below the number of classes; kept as int64. Of data with several
            labels a sample, zeros and ones ``(N, L)``.
        class_names: One name a class, in the order of the labels or of their columns.

    Raises:
        InvalidArgumentError: Shapes, dtypes, lengths or values are others; the text names the field.

    Example:
        >>> images = np.full((2, 1, 3, 3), 255, np.uint8)
        >>> data = Dataset(name="two", images=images, labels=np.array([1, 0]), class_names=("a", "b"))
        >>> data
        Dataset(name='two', images=(2, 1, 3, 3) uint8, classes=2)
        >>> inputs, labels = data.take([0], bounds=(-1.0, 1.0))
        >>> inputs.shape, inputs.max(), labels
        (torch.Size([1, 1, 3, 3]), tensor(1.), tensor([1]))
    """

    name: str
    images: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgumentError("name", self.name, "a text that is not empty")
        names = self.class_names
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise InvalidArgumentError("class_names", names, "a tuple of texts, one a class")
        images = _check_images(self.images)
        labels = _check_labels(self.labels, samples=len(images), classes=len(names))
        for field, values in (("images", images.view()), ("labels", labels.view())):
            values.flags.writeable = False
            object.__setattr__(self, field, values)
        object.__setattr__(self, "class_names", tuple(names))

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        images = f"{self.images.shape} {self.images.dtype}"
        return f"Dataset(name={self.name!r}, images={images}, classes={self.classes})"

    @property
    def classes(self) -> int:
        """Number of classes, also of those without an image."""
        return len(self.class_names)

    def take(
        self,
        indices: Sequence[int] | NDArray[Any] | Tensor,
        *,
        bounds: tuple[float, float] = (0.0, 1.0),
        size: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some samples, in the order of ``indices``.

        Args:
            indices: Positions, each at least 0 and below ``len(self)``; may repeat.
            bounds: Input values that stand for black and for white; a table is taken as it is.
            size: Height and width that images are resized to, bilinear with antialiasing; theirs when left out.

        Returns:
            Inputs ``(len(indices), C, H, W)`` float32 in ``bounds``, or ``(len(indices), D)``, and labels
            ``(len(indices),)`` or ``(len(indices), L)`` int64, both new and on the CPU.

        Raises:
            InvalidArgumentError: An index or the bounds are not acceptable.
        """
        positions = self._check_indices(indices)
        low, high = check_bounds(bounds)
        inputs = torch.from_numpy(np.ascontiguousarray(self.images[positions], dtype=np.float32))
        if self.images.dtype == np.uint8:
            inputs /= 255
        if size is not None:
            inputs = functional.interpolate(inputs, size, mode="bilinear", antialias=True).clamp_(0, 1)
        if inputs.dim() == 4 and (low, high) != (0.0, 1.0):
            # The nearest float32 of a bound may lie beyond it, and so may a rounded product: clamp to the last inside.
            lowest, highest = np.float32(low), np.float32(high)
            lowest = np.nextafter(lowest, np.float32(np.inf)) if float(lowest) < low else lowest
            highest = np.nextafter(highest, np.float32(-np.inf)) if float(highest) > high else highest
            inputs.mul_(high - low).add_(low).clamp_(float(lowest), float(highest))
        return inputs, torch.from_numpy(self.labels[positions])

    def choose(self, count: int, *, seed: int, order: str = "random") -> NDArray[np.int64]:
        """Indices of some samples, without repetition.

        Args:
            count: How many, at most ``len(self)``.
            seed: Of the permutation; any integer of at least 0.
            order: ``"random"``: the beginning of a permutation that depends on the seed and the number of images
                only, so that a smaller choice is the beginning of a larger one. ``"first"``: 0, 1, 2, and so on.

        Returns:
            int64 ``(count,)``.

        Raises:
            InvalidArgumentError: There are fewer images than ``count``, or an argument is not acceptable.

        Example:
            >>> images = np.zeros((5, 1, 2, 2), np.uint8)
            >>> data = Dataset(name="five", images=images, labels=np.zeros(5, int), class_names=("a",))
            >>> bool((data.choose(2, seed=0) == data.choose(5, seed=0)[:2]).all())
            True
            >>> data.choose(3, seed=0, order="first")
            array([0, 1, 2])
        """
        count = check_integer("count", count, minimum=0)
        check_integer("seed", seed, minimum=0)
        check_choice("order", order, ("random", "first"))
        if count > len(self):
            raise InvalidArgumentError("count", count, f"at most {len(self)}, the number of images in {self.name}")
        if order == "first":
            return np.arange(count, dtype=np.int64)
        permutation: NDArray[np.int64] = torch.randperm(len(self), generator=stream(seed, "dataset", "order")).numpy()
        return permutation[:count].copy()

    def _check_indices(self, indices: Sequence[int] | NDArray[Any] | Tensor) -> NDArray[np.int64]:
        try:
            values = np.asarray(indices.detach().cpu() if isinstance(indices, Tensor) else indices)
        except (TypeError, ValueError):
            values = np.array(None)
        if values.ndim == 1 and values.size == 0:
            return np.empty(0, dtype=np.int64)
        got = f"shape {values.shape} of dtype {values.dtype}"
        if values.ndim == 1 and values.dtype.kind in "iu":
            if values.min() >= 0 and values.max() < len(self):
                return values.astype(np.int64)
            got = f"values in {values.min()}..{values.max()}"
        expected = f"a list of integers of at least 0 and below {len(self)}, the number of images in {self.name}"
        raise InvalidArgumentError("indices", got, expected)


def _check_images(images: object) -> NDArray[np.uint8] | NDArray[np.float32]:
    if not isinstance(images, np.ndarray):
        raise InvalidArgumentError("images", type(images).__name__, "a numpy array of shape (N, C, H, W)")
    if images.dtype not in (np.uint8, np.float32):
        raise InvalidArgumentError("images", f"dtype {images.dtype}", "uint8 (0..255) or float32 (0..1)")
    if images.ndim not in (2, 4) or 0 in images.shape[1:]:
        expected = "shape (N, C, H, W), or (N, D) of a table, only N may be 0"
        raise InvalidArgumentError("images", f"shape {images.shape}", expected)
    if images.ndim == 2 and images.dtype != np.float32:
        raise InvalidArgumentError("images", f"a table of dtype {images.dtype}", "float32")
    if images.dtype == np.float32 and images.size:
        # NaN passes through min and max, and no comparison with it holds.
        with np.errstate(invalid="ignore"):
            low, high = float(images.min()), float(images.max())
        if images.ndim == 2 and not np.isfinite([low, high]).all():
            raise InvalidArgumentError("images", "a table with NaN or infinity", "finite values")
        if images.ndim == 4 and not (low >= 0 and high <= 1):
            expected = "finite values in [0, 1]: divide pixels of 0..255 by 255"
            raise InvalidArgumentError("images", f"values in [{low:g}, {high:g}]", expected)
    return images


def _check_labels(labels: object, *, samples: int, classes: int) -> NDArray[np.int64]:
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu":
        got = f"dtype {labels.dtype}" if isinstance(labels, np.ndarray) else type(labels).__name__
        raise InvalidArgumentError("labels", got, "a numpy array of integer class labels (int64)")
    if labels.shape == (samples, classes) and classes > 1 and bool(((labels == 0) | (labels == 1)).all()):
        return labels.astype(np.int64)
    if labels.shape != (samples,):
        raise InvalidArgumentError("labels", f"shape {labels.shape}", f"shape ({samples},), one label an image")
    if samples and (labels.min() < 0 or labels.max() >= classes):
        expected = f"labels of at least 0 and below {classes}, the number of class names"
        raise InvalidArgumentError("labels", f"labels in {labels.min()}..{labels.max()}", expected)
    return labels.astype(np.int64)


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
    looked, incomplete = [], []
    for folder, wanted in places:
        found = [next((folder / name for name in names if (folder / name).is_file()), None) for names in wanted]
        paths = [path for path in found if path is not None]
        if len(paths) == len(wanted):
            return paths
        looked.append(folder / wanted[found.index(None)][0])
        incomplete += looked[-1:] if paths else []
    if incomplete:
        expected = f"it next to the other files of {data}"
        raise unusable(incomplete[0], "no such file", expected, f"add it; download it from {source}")
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
