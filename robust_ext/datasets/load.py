"""From a name or a path to a dataset; the digits, which need no files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from robust_ext.core.errors import DataError, InvalidArgumentError, MissingDependencyError
from robust_ext.core.validation import check_choice
from robust_ext.datasets.base import Dataset, reading, unusable
from robust_ext.datasets.cifar import load_cifar10, load_cifar100
from robust_ext.datasets.idx import load_fashion_mnist, load_mnist
from robust_ext.datasets.image_folder import load_image_folder
from robust_ext.datasets.npz import load_npz
from robust_ext.datasets.street import load_gtsrb, load_svhn

_TEST_DIGITS = 500


def load_dataset(spec: str, *, root: str | os.PathLike[str] | None = None, split: str = "test") -> Dataset:
    """Load labelled images by a name or from a path.

    Args:
        spec: ``"digits"`` (comes with scikit-learn), ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"``, ``"cifar100"``,
            ``"gtsrb"``, ``"svhn"`` (from files below ``root``), or the path of an ``.npz`` file or of a folder of
            images, relative to the working directory or else to ``root``. Names come first: a folder called
            ``digits`` is ``"./digits"``.
        root: Folder with the user's data; the working directory if not given.
        split: ``"test"`` or ``"train"``. Files and folders without splits are used as they are for either.

    Raises:
        DataError: Files are missing, damaged or not what their names promise; names where they were looked for.
        InvalidArgumentError: An argument is of another type, or there is no such split.
        MissingDependencyError: scikit-learn (digits) or Pillow (folders, gtsrb) is not installed.

    Example:
        >>> digits = load_dataset("digits")
        >>> digits
        Dataset(name='digits-test', images=(500, 1, 8, 8) float32, classes=10)
        >>> inputs, labels = digits.take(digits.choose(3, seed=0))
        >>> inputs.shape, inputs.dtype, labels.dtype
        (torch.Size([3, 1, 8, 8]), torch.float32, torch.int64)
    """
    if not isinstance(spec, str) or not spec.strip():
        raise InvalidArgumentError("spec", repr(spec), _EXPECTED)
    check_choice("split", split, ("train", "test"))
    folder = _check_root(root)
    with reading(spec):
        if spec in _NAMED:
            return _NAMED[spec](folder, split)
        path = _find_path(spec, folder)
        if path.is_dir():
            return load_image_folder(path, split)
        if path.suffix.lower() == ".npz":
            return load_npz(path, split)
    then = "save images and labels with numpy.savez, or name a folder of images"
    raise unusable(path, f"a file ending in {path.suffix!r}", _EXPECTED, then)


def _load_digits(_: Path, split: str) -> Dataset:
    """The 8x8 digits that ship with scikit-learn, ``(N, 1, 8, 8)`` float32 in steps of 1/16.

    The test set is the last 500 of the 1,797 images in scikit-learn's order, the training set the 1,297 before them:
    the images are ordered by writer, so the test digits are by other hands than most of the training digits.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingDependencyError('The digits need scikit-learn: pip install "robust-ext[cli]"') from error
    digits = datasets.load_digits()
    part = slice(-_TEST_DIGITS, None) if split == "test" else slice(None, -_TEST_DIGITS)
    images = (digits.images[part, None] / 16).astype(np.float32)
    return Dataset(name=f"digits-{split}", images=images, labels=digits.target[part], class_names=tuple("0123456789"))


def _check_root(root: object) -> Path:
    if root is None:
        return Path.cwd()
    path = os.fspath(root) if isinstance(root, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise InvalidArgumentError("root", root, "the path of a folder, as a text or pathlib.Path")
    folder = Path(path).expanduser()
    with reading(folder):
        if not folder.is_dir():
            raise DataError(f"root: no folder at {folder}; name the folder that holds the data (--data-root)")
    return folder


def _find_path(spec: str, root: Path) -> Path:
    given = Path(spec).expanduser()
    places = list(dict.fromkeys([Path.cwd() / given, root / given]))
    for place in places:
        if place.exists():
            return place
    raise DataError(f"{spec}: not found, looked for {' and '.join(map(str, places))}; expected {_EXPECTED}")


_NAMED: dict[str, Callable[[Path, str], Dataset]] = {
    "digits": _load_digits,
    "mnist": load_mnist,
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "gtsrb": load_gtsrb,
    "svhn": load_svhn,
}
NAMES = tuple(_NAMED)
"""Names of data sets."""

_EXPECTED = f"one of {', '.join(NAMES)}, or the path of an .npz file or of a folder of images"
