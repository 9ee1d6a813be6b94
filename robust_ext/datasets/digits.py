"""The digits that ship with scikit-learn: small, real, and on every machine."""

from __future__ import annotations

import numpy as np

from robust_ext.core.errors import MissingDependencyError
from robust_ext.datasets.base import Dataset

TEST_SAMPLES = 500


def load_digits(split: str) -> Dataset:
    """The 8x8 digits, ``(N, 1, 8, 8)`` float32 in steps of 1/16.

    The test set is the last 500 of the 1,797 images in scikit-learn's order, the training set the 1,297 before them:
    the images are ordered by writer, so the test digits are by other hands than most of the training digits.

    Args:
        split: ``"train"`` or ``"test"``.

    Raises:
        MissingDependencyError: scikit-learn is not installed.

    Example:
        >>> load_digits("test")
        Dataset(name='digits-test', images=(500, 1, 8, 8) float32, classes=10)
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingDependencyError('The digits need scikit-learn: pip install "robust-ext[cli]"') from error
    digits = datasets.load_digits()
    part = slice(-TEST_SAMPLES, None) if split == "test" else slice(None, -TEST_SAMPLES)
    return Dataset(
        name=f"digits-{split}",
        images=(digits.images[part, None] / 16).astype(np.float32),
        labels=digits.target[part],
        class_names=tuple("0123456789"),
    )
