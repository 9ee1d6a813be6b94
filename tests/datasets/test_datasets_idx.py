"""idx files: round trips, damage, and where they are looked for."""

import gzip
import math
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from robust_ext.core.errors import DataError
from robust_ext.datasets import load_dataset
from robust_ext.datasets.idx import read_idx
from tests.datasets.files import REAL, check_refused


def idx(array, *, type_code=0x08):
    return struct.pack(f">HBB{array.ndim}I", 0, type_code, array.ndim, *array.shape) + array.tobytes()


def images_of(count, *, size=(28, 28)):
    return np.random.default_rng(0).integers(0, 256, (count, *size), dtype=np.uint8)


def write(folder, images, labels, *, prefix="t10k", separator="-", packed=False):
    folder.mkdir(parents=True, exist_ok=True)
    for kind, dimensions, array in (("images", 3, images), ("labels", 1, np.asarray(labels, np.uint8))):
        name = f"{prefix}-{kind}{separator}idx{dimensions}-ubyte" + (".gz" if packed else "")
        (folder / name).write_bytes(gzip.compress(idx(array)) if packed else idx(array))


@given(npst.arrays(np.uint8, npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)), st.booleans())
def test_round_trip(tmp_path_factory, array, packed):
    path = tmp_path_factory.getbasetemp() / "any.idx"
    path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    read = read_idx(path, dimensions=array.ndim)
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, array)


@given(st.binary(max_size=40), st.integers(1, 3))
def test_any_bytes_give_an_array_or_a_data_error(tmp_path_factory, content, dimensions):
    path = tmp_path_factory.getbasetemp() / "bytes.idx"
    for start in (b"", bytes([0, 0, 8, dimensions]), b"\x1f\x8b\x08\x00"):
        path.write_bytes(start + content)
        try:
            array = read_idx(path, dimensions=dimensions)
        except DataError:
            continue
        assert math.prod(array.shape) <= len(content)


@pytest.mark.parametrize(
    "folder", ["", "raw", "mnist", "MNIST", "MNIST/raw", "mnist/raw"], ids=lambda folder: folder or "root"
)
def test_found_in_the_usual_folders(monkeypatch, tmp_path, folder):
    images = images_of(3)
    write(tmp_path / folder, images, [7, 2, 9])
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(load_dataset("mnist").images[:, 0], images)
    monkeypatch.chdir("/")
    data = load_dataset("mnist", root=tmp_path)
    np.testing.assert_array_equal(data.images[:, 0], images)
    assert data.labels.tolist() == [7, 2, 9]
    assert (data.name, data.images.dtype, data.class_names[7]) == ("mnist-test", np.uint8, "7")


@pytest.mark.parametrize("separator", ["-", "."])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("split", "prefix"), [("train", "train"), ("test", "t10k")])
def test_every_name(tmp_path, separator, packed, split, prefix):
    images = images_of(2)
    write(tmp_path, images, [0, 1], prefix=prefix, separator=separator, packed=packed)
    np.testing.assert_array_equal(load_dataset("mnist", root=tmp_path, split=split).images[:, 0], images)
    check_refused(["no files found"], "mnist", root=tmp_path, split="test" if split == "train" else "train")


def test_the_two_datasets_are_distinguished_by_their_folders(tmp_path):
    for folder, value in (("mnist", 1), ("fashion-mnist", 2), ("", 3)):
        write(tmp_path / folder, np.full((1, 28, 28), value, np.uint8), [9])
    assert load_dataset("mnist", root=tmp_path).images.max() == 1
    fashion = load_dataset("fashion-mnist", root=tmp_path)
    assert (fashion.images.max(), fashion.class_names[fashion.labels[0]]) == (2, "ankle boot")


@pytest.mark.parametrize("count", [0, 1])
def test_few_samples_of_unpacked_files_that_kept_their_names(tmp_path, count):
    write(tmp_path, images_of(count), [5] * count)
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name + ".gz"))
    data = load_dataset("mnist", root=tmp_path)
    assert (data.images.shape, data.classes) == ((count, 1, 28, 28), 10)


IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def test_a_gzipped_file_that_unpacks_to_too_much_is_refused_by_its_header(tmp_path, monkeypatch):
    """A few bytes of zeros unpack to gigabytes; nothing is allocated for them."""
    header = struct.pack(">HBB3I", 0, 8, 3, 1 << 20, 32, 33)
    write(tmp_path, images_of(2), [0, 1], packed=True)
    path = tmp_path / f"{IMAGES}.gz"
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(header + bytes(1 << 20)))
    tracemalloc.start()
    check_refused([path, "1,107,296,256 bytes", "at most 1,073,741,824", "gunzip"], "mnist", root=tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    path.write_bytes(whole)
    monkeypatch.setattr("robust_ext.datasets.idx._LARGEST_PACKED", 2 * 28 * 28)
    assert len(load_dataset("mnist", root=tmp_path)) == 2
    monkeypatch.setattr("robust_ext.datasets.idx._LARGEST_PACKED", 2 * 28 * 28 - 1)
    check_refused([path, "1,568 bytes", "at most 1,567"], "mnist", root=tmp_path)


def test_the_real_mnist():
    if not (REAL / "mnist" / f"{IMAGES}.gz").is_file():
        pytest.skip(f"no MNIST test files in {REAL / 'mnist'}")
    data = load_dataset("mnist", root=REAL)
    assert data.images.shape == (10_000, 1, 28, 28)
    assert np.bincount(data.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.labels[:5].tolist() == [7, 2, 1, 0, 4]


@pytest.mark.parametrize(("labels", "words"), [([1, 10], "labels in 1..10"), ([1], "one label an image")])
def test_labels_that_do_not_fit_are_named(tmp_path, labels, words):
    write(tmp_path, images_of(2), [0, 1])
    (tmp_path / LABELS).write_bytes(idx(np.array(labels, np.uint8)))
    check_refused([tmp_path / LABELS, words], "mnist", root=tmp_path)
