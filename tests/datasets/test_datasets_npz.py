"""Arrays in one file."""

import time
import tracemalloc
import zipfile

import numpy as np
import pytest
from numpy.lib import format as npy

from robust_ext.core.errors import DataError
from robust_ext.datasets import load_dataset
from tests.datasets.files import check_refused

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3, 6, 5), dtype=np.uint8)
LABELS = np.array([0, 2, 1, 2])


def load(tmp_path, *, split="test", **arrays):
    path = tmp_path / "toy.npz"
    np.savez(path, **arrays)
    return load_dataset(str(path), split=split)


@pytest.mark.parametrize("keys", [("images", "labels"), ("x", "y"), ("x_test", "y_test")])
def test_keys(tmp_path, keys):
    data = load(tmp_path, **dict(zip(keys, (IMAGES, LABELS), strict=True)))
    np.testing.assert_array_equal(data.images, IMAGES)
    assert (data.labels.tolist(), data.class_names) == ([0, 2, 1, 2], ("0", "1", "2"))
    assert data.name == ("toy-test" if keys == ("x_test", "y_test") else "toy")


def test_splits_come_before_the_rest(tmp_path):
    arrays = {"x_test": IMAGES[:1], "y_test": [1], "x_train": IMAGES[1:], "y_train": LABELS[1:]}
    arrays |= {"x": IMAGES, "y": LABELS}
    assert len(load(tmp_path, **arrays)) == 1
    assert len(load(tmp_path, **arrays, split="train")) == 3
    del arrays["x_test"]
    assert len(load(tmp_path, **arrays)) == 4
    with pytest.raises(DataError, match=r"got arrays x_train, y_train, expected arrays x_test and y_test, or images"):
        load(tmp_path, x_train=IMAGES, y_train=LABELS)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("last", [True, False])
def test_channels_at_either_end(tmp_path, channels, last):
    images = np.random.default_rng(0).integers(0, 256, (4, channels, 6, 5), dtype=np.uint8)
    data = load(tmp_path, x=np.moveaxis(images, 1, -1) if last else images, y=LABELS)
    np.testing.assert_array_equal(data.images, images)
    # Grey images without channels.
    np.testing.assert_array_equal(load(tmp_path, x=images[:, 0], y=LABELS).images, images[:, :1])


def test_a_table_is_taken_as_it_is(tmp_path):
    table = np.array([[18.0, -3e5], [90.0, 0.5], [0.0, 2.0]])
    data = load(tmp_path, x=table, y=LABELS[:3])
    inputs, labels = data.take([2, 0], bounds=(-1e6, 1e6))
    np.testing.assert_array_equal(inputs, table[[2, 0]].astype(np.float32))
    assert labels.tolist() == [1, 0]
    for odd in (table.astype(int), table * np.nan):
        with pytest.raises(DataError, match="a table"):
            load(tmp_path, x=odd, y=LABELS[:3])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_floats(tmp_path, dtype):
    images = (IMAGES / 255).astype(dtype)
    data = load(tmp_path, x=images, y=LABELS)
    assert data.images.dtype == np.float32
    np.testing.assert_array_equal(data.images, images.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_labels_of_any_integers_in_a_column(tmp_path, dtype):
    assert load(tmp_path, x=IMAGES, y=LABELS.astype(dtype)[:, None]).labels.tolist() == [0, 2, 1, 2]


def test_class_names(tmp_path):
    assert load(tmp_path, x=IMAGES, y=LABELS, class_names=["a", "b", "c", "d"]).class_names == ("a", "b", "c", "d")
    with pytest.raises(DataError, match=r"labels in 0\.\.2.*below 2"):
        load(tmp_path, x=IMAGES, y=LABELS, class_names=["a", "b"])
    with pytest.raises(DataError, match="class_names of shape"):
        load(tmp_path, x=IMAGES, y=LABELS, class_names=[1, 2, 3])


@pytest.mark.parametrize("count", [0, 1])
def test_few_samples(tmp_path, count):
    data = load(tmp_path, x=IMAGES[:count], y=LABELS[:count])
    assert (len(data), data.classes) == (count, count)


def test_object_arrays_are_refused(tmp_path):
    class Touch:
        def __reduce__(self):
            return (tmp_path / "trace").touch, ()

    with pytest.raises(DataError, match="allow_pickle"):
        load(tmp_path, x=IMAGES, y=np.array([Touch()], dtype=object))
    assert not (tmp_path / "trace").exists()


def bomb(path, *, size, header=None):
    """A file whose images are zeros, of so many bytes when unpacked; the header may declare another shape."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("images.npy", "w", force_zip64=True) as entry:
            npy.write_array_header_1_0(entry, header or {"descr": "|u1", "fortran_order": False, "shape": (size, 1, 1)})
            for start in range(0, size, 2**24):
                entry.write(bytes(min(2**24, size - start)))
        with archive.open("labels.npy", "w") as entry:
            npy.write_array(entry, np.zeros(size % 1000, np.int64))


def peak_of(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "toy.npz"
    bomb(path, size=300 * 2**20)
    assert path.stat().st_size < 2**20
    begun = time.perf_counter()
    peak = peak_of(lambda: check_refused(["toy.npz: got ", "bytes that unpack to 314,57", "100 times"], path))
    assert peak < 10 * 2**20
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize("shape", [(10**12, 1, 1), (2**63, 2**63), (5, 1, 1), (-3, 1, 1)])
def test_a_header_that_declares_another_size_is_refused(tmp_path, shape):
    path = tmp_path / "toy.npz"
    bomb(path, size=1000, header={"descr": "|u1", "fortran_order": False, "shape": shape})
    assert peak_of(lambda: check_refused(["toy.npz: got images.npy of 1000 bytes where shape", "needs"], path)) < 2**22


def test_zeros_are_no_bombs(tmp_path):
    zeros = np.zeros((4000, 1, 32, 32), np.uint8)
    np.savez_compressed(tmp_path / "toy.npz", x=zeros, y=np.zeros(4000, np.int64))
    assert len(load_dataset(str(tmp_path / "toy.npz"))) == 4000
