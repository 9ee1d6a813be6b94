"""load_dataset: names, paths, and what the package imports."""

import builtins

import numpy as np
import pytest
from PIL import Image

from robust_ext.core.errors import MissingDependencyError
from robust_ext.datasets import load_dataset


def save(path, *, value=7):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, images=np.full((2, 1, 8, 8), value, np.uint8), labels=np.array([0, 1]))


def test_digits():
    test, train = load_dataset("digits"), load_dataset("digits", split="train")
    assert (test.name, train.name) == ("digits-test", "digits-train")
    assert (len(test), len(train), test.classes) == (500, 1297, 10)
    assert set(np.unique(test.images * 16)) == set(range(17))
    assert np.bincount(test.labels).min() > 40
    whole = pytest.importorskip("sklearn.datasets").load_digits()
    np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0] * 16, whole.images)
    np.testing.assert_array_equal(np.concatenate([train.labels, test.labels]), whole.target)


@pytest.mark.parametrize("package", ["sklearn", "PIL"])
def test_without_optional_packages(monkeypatch, tmp_path, package):
    (tmp_path / "a").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "a" / "0.png")
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match=r'pip install "robust-ext\[cli\]"'):
        load_dataset("digits" if package == "sklearn" else str(tmp_path))


def test_working_directory_comes_before_root(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "root" / "data.npz", value=1)
    assert load_dataset("data.npz", root="root").images.max() == 1
    save(tmp_path / "data.npz", value=2)
    assert load_dataset("data.npz", root=tmp_path / "root").images.max() == 2
    assert load_dataset(str(tmp_path / "root" / "data.npz")).images.max() == 1
