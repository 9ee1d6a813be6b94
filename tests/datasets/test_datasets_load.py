"""load_dataset: names, paths, and what the package imports."""

import builtins
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from robust_ext.core.errors import DataError, InvalidArgumentError, MissingDependencyError
from robust_ext.datasets import load_dataset


def save(path, *, value=7):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, images=np.full((2, 1, 8, 8), value, np.uint8), labels=np.array([0, 1]))


def without(monkeypatch, package):
    """Make the import of a package fail."""
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_digits():
    test, train = load_dataset("digits"), load_dataset("digits", split="train")
    assert (test.name, train.name) == ("digits-test", "digits-train")
    assert (len(test), len(train), test.classes) == (500, 1297, 10)
    assert set(np.unique(test.images * 16)) == set(range(17))
    assert np.bincount(test.labels).min() > 40
    whole = pytest.importorskip("sklearn.datasets").load_digits()
    np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0] * 16, whole.images)
    np.testing.assert_array_equal(np.concatenate([train.labels, test.labels]), whole.target)


def test_importing_the_package_imports_no_optional_one():
    code = "import sys, robust_ext.datasets; assert not {'sklearn', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_digits_without_scikit_learn(monkeypatch):
    without(monkeypatch, "sklearn")
    with pytest.raises(MissingDependencyError, match=r'pip install "robust-ext\[cli\]"'):
        load_dataset("digits")


def test_folder_without_pillow(monkeypatch, tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "a" / "0.png")
    without(monkeypatch, "PIL")
    with pytest.raises(MissingDependencyError, match=r'pip install "robust-ext\[cli\]"'):
        load_dataset(str(tmp_path))


def test_working_directory_comes_before_root(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "root" / "data.npz", value=1)
    assert load_dataset("data.npz", root="root").images.max() == 1
    save(tmp_path / "data.npz", value=2)
    assert load_dataset("data.npz", root=tmp_path / "root").images.max() == 2
    assert load_dataset(str(tmp_path / "root" / "data.npz")).images.max() == 1


def test_missing_path_names_where_it_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").mkdir()
    with pytest.raises(DataError) as caught:
        load_dataset("mnits", root="root")
    for part in (str(tmp_path / "mnits"), "root/mnits", "digits, mnist, fashion-mnist, cifar10, cifar100", ".npz"):
        assert part in str(caught.value)


def test_files_of_other_formats(tmp_path):
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"data\.csv: got a file ending in '\.csv'.*numpy\.savez"):
        load_dataset("data.csv", root=tmp_path)


def test_path_that_the_system_refuses():
    with pytest.raises(DataError, match="check path and permissions"):
        load_dataset("x" * 5000)


@pytest.mark.parametrize("spec", ["", " ", 3, None, b"digits"])
def test_other_specs(spec):
    with pytest.raises(InvalidArgumentError, match="spec"):
        load_dataset(spec)


def test_other_splits():
    with pytest.raises(InvalidArgumentError, match="split: got 'val', expected one of 'train', 'test'"):
        load_dataset("digits", split="val")


def test_other_roots(tmp_path):
    with pytest.raises(DataError, match=r"no folder at .*nowhere"):
        load_dataset("mnist", root=tmp_path / "nowhere")
    for root in (3, b"."):
        with pytest.raises(InvalidArgumentError, match="root"):
            load_dataset("mnist", root=root)
