"""Datasets of arrays, idx and npz files, and what is taken from them: round trips, damage, and where files lie."""

import gzip
import math
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.lib import format as npy

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.validation import check_inputs
from robust_ext.datasets import Dataset, load_dataset
from robust_ext.datasets.idx import read_idx


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def check_refused(parts, spec, **given):
    with pytest.raises(DataError) as caught:
        load_dataset(str(spec), **given)
    for part in parts:
        assert str(part) in str(caught.value)


def make(count=20, *, dtype=np.uint8):
    images = np.arange(count * 12, dtype=np.int64).reshape(count, 3, 2, 2) % 256
    images = images.astype(np.uint8) if dtype == np.uint8 else (images / 255).astype(dtype)
    return Dataset(name="toy", images=images, labels=np.arange(count) % 4, class_names=("a", "b", "c", "d"))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_what_is_taken_is_scaled_to_the_bounds_and_leaves_the_dataset_alone(dtype):
    images = np.linspace(0, 255 if dtype == np.uint8 else 1, 256).astype(dtype).reshape(1, 1, 16, 16)
    ramp = Dataset(name="ramp", images=images, labels=np.zeros(1, int), class_names=("a",))
    for bounds in ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0), (0.1, 0.3), (-0.7, -0.1), (1e-3, 1e3)):
        inputs, _ = ramp.take([0], bounds=bounds)
        check_inputs("inputs", inputs, bounds=bounds)
        assert [float(inputs.min()), float(inputs.max())] == pytest.approx(bounds, rel=1e-6)
    data = make(dtype=dtype)
    before, (inputs, labels) = data.images.copy(), data.take([3, 0, 3])
    assert (inputs.dtype, labels.tolist()) == (torch.float32, [3, 0, 3])
    torch.testing.assert_close(inputs[0], torch.arange(36, 48).reshape(3, 2, 2) / 255, rtol=0, atol=1e-7)
    inputs.zero_()
    np.testing.assert_array_equal(data.images, before)
    with pytest.raises(ValueError, match="read-only"):
        data.images[0] = 0
    for indices in (np.array([1, 2], np.uint16), torch.tensor([1, 2]), range(1, 3), (1, 2)):
        assert data.take(indices)[1].tolist() == [1, 2]
    assert [tuple(part.shape) for part in data.take([])] == [(0, 3, 2, 2), (0,)]


def test_a_smaller_choice_begins_a_larger_one():
    data = make()
    whole = data.choose(20, seed=7)
    assert sorted(whole) == list(range(20))
    for count in range(21):
        np.testing.assert_array_equal(data.choose(count, seed=7), whole[:count])
    assert (data.choose(20, seed=8) != whole).any()
    np.testing.assert_array_equal(data.choose(5, seed=7, order="first"), np.arange(5))
    # The same on every machine.
    assert data.choose(5, seed=0).tolist() == [4, 10, 6, 18, 3]
    with pytest.raises(InvalidArgumentError, match="got 21, expected at most 20, the number of images in toy"):
        data.choose(21, seed=0)


def test_digits():
    test, train = load_dataset("digits"), load_dataset("digits", split="train")
    assert (test.name, train.name, test.classes) == ("digits-test", "digits-train", 10)
    assert (len(test), len(train)) == (500, 1297)
    whole = pytest.importorskip("sklearn.datasets").load_digits()
    np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0] * 16, whole.images)
    np.testing.assert_array_equal(np.concatenate([train.labels, test.labels]), whole.target)


# idx files.
IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
DIGITS = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)


def idx(array, *, packed=False):
    content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    return gzip.compress(content) if packed else content


def write_idx(folder, images, labels, *, prefix="t10k", separator="-", packed=False):
    for kind, dimensions, array in (("images", 3, images), ("labels", 1, np.asarray(labels, np.uint8))):
        name = f"{prefix}-{kind}{separator}idx{dimensions}-ubyte" + ".gz" * packed
        write(folder / name, idx(array, packed=packed))


@given(npst.arrays(np.uint8, npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)), st.booleans())
def test_round_trip(tmp_path_factory, array, packed):
    path = tmp_path_factory.getbasetemp() / "any.idx"
    path.write_bytes(idx(array, packed=packed))
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


def test_found_in_the_usual_folders(monkeypatch, tmp_path):
    for place, folder in enumerate(("", "raw", "mnist", "MNIST", "MNIST/raw", "mnist/raw")):
        root = tmp_path / str(place)
        write_idx(root / folder, DIGITS, [7, 2, 9])
        monkeypatch.chdir(root)
        np.testing.assert_array_equal(load_dataset("mnist").images[:, 0], DIGITS)
        monkeypatch.chdir("/")
        data = load_dataset("mnist", root=root)
        np.testing.assert_array_equal(data.images[:, 0], DIGITS)
    assert (data.name, data.images.dtype, data.class_names[7]) == ("mnist-test", np.uint8, "7")
    assert data.labels.tolist() == [7, 2, 9]


@pytest.mark.parametrize(("separator", "packed"), [("-", False), ("-", True), (".", False)])
def test_every_name_of_a_split_and_the_folder_of_a_dataset(tmp_path, separator, packed):
    write_idx(tmp_path, DIGITS, [0, 1, 2], prefix="train", separator=separator, packed=packed)
    np.testing.assert_array_equal(load_dataset("mnist", root=tmp_path, split="train").images[:, 0], DIGITS)
    check_refused(["no files found"], "mnist", root=tmp_path)
    for folder, value in (("mnist", 1), ("fashion-mnist", 2), ("", 3)):
        write_idx(tmp_path / folder, np.full((1, 28, 28), value, np.uint8), [9])
    assert load_dataset("mnist", root=tmp_path).images.max() == 1
    fashion = load_dataset("fashion-mnist", root=tmp_path)
    assert (fashion.images.max(), fashion.class_names[fashion.labels[0]]) == (2, "ankle boot")


def test_no_samples_unpacked_files_that_kept_their_names_and_labels_that_do_not_fit(tmp_path):
    for count in (0, 2):
        write_idx(tmp_path, DIGITS[:count], [5] * count)
        for name in (IMAGES, LABELS):
            (tmp_path / name).rename(tmp_path / f"{name}.gz")
        data = load_dataset("mnist", root=tmp_path)
        assert (data.images.shape, data.classes) == ((count, 1, 28, 28), 10)
    path = tmp_path / f"{LABELS}.gz"
    for labels, words in (([1, 10], "labels in 1..10"), ([1], "one label an image")):
        path.write_bytes(idx(np.array(labels, np.uint8)))
        check_refused([path, words], "mnist", root=tmp_path)


def peak_of(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_gzipped_file_that_unpacks_to_too_much_is_refused_by_its_header(tmp_path, monkeypatch):
    """A few bytes of zeros unpack to gigabytes; nothing is allocated for them."""
    write_idx(tmp_path, DIGITS[:2], [0, 1], packed=True)
    path = tmp_path / f"{IMAGES}.gz"
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 1 << 20, 32, 33) + bytes(1 << 20)))
    parts = [path, "1,107,296,256 bytes", "at most 1,073,741,824", "gunzip"]
    assert peak_of(lambda: check_refused(parts, "mnist", root=tmp_path)) < 1 << 20
    path.write_bytes(whole)
    monkeypatch.setattr("robust_ext.datasets.idx._LARGEST_PACKED", 2 * 28 * 28)
    assert len(load_dataset("mnist", root=tmp_path)) == 2
    monkeypatch.setattr("robust_ext.datasets.idx._LARGEST_PACKED", 2 * 28 * 28 - 1)
    check_refused([path, "1,568 bytes", "at most 1,567"], "mnist", root=tmp_path)


# npz files.
COLOURS = np.random.default_rng(0).integers(0, 256, (4, 3, 6, 5), dtype=np.uint8)
CLASSES = np.array([0, 2, 1, 2])


@pytest.fixture
def load(tmp_path):
    def one(*, split="test", **arrays):
        np.savez(tmp_path / "toy.npz", **arrays)
        return load_dataset(str(tmp_path / "toy.npz"), split=split)

    return one


def test_keys(load):
    for keys, name in ((("images", "labels"), "toy"), (("x", "y"), "toy"), (("x_test", "y_test"), "toy-test")):
        data = load(**dict(zip(keys, (COLOURS, CLASSES), strict=True)))
        np.testing.assert_array_equal(data.images, COLOURS)
        assert (data.name, data.labels.tolist(), data.class_names) == (name, [0, 2, 1, 2], ("0", "1", "2"))


def test_splits_come_before_the_rest_and_the_working_directory_before_the_root(load, monkeypatch, tmp_path):
    arrays = {"x_test": COLOURS[:1], "y_test": [1], "x_train": COLOURS[1:], "y_train": CLASSES[1:]}
    arrays |= {"x": COLOURS, "y": CLASSES}
    assert (len(load(**arrays)), len(load(**arrays, split="train"))) == (1, 3)
    del arrays["x_test"]
    assert len(load(**arrays)) == 4
    with pytest.raises(DataError, match=r"got arrays x_train, y_train, expected arrays x_test and y_test, or images"):
        load(x_train=COLOURS, y_train=CLASSES)
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path)
    np.savez("root/data.npz", x=COLOURS[:1], y=CLASSES[:1])
    assert len(load_dataset("data.npz", root="root")) == 1
    np.savez("data.npz", x=COLOURS, y=CLASSES)
    assert len(load_dataset("data.npz", root="root")) == 4
    assert len(load_dataset(str(tmp_path / "root" / "data.npz"))) == 1


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_shapes_and_types(load, channels):
    images = np.random.default_rng(0).integers(0, 256, (4, channels, 6, 5), dtype=np.uint8)
    for given_images, wanted in (
        *((images, images), (np.moveaxis(images, 1, -1), images)),
        # Grey images without channels, and none.
        *((images[:, 0], images[:, :1]), (images[:0], images[:0])),
        *(((images / 255).astype(dtype), (images / 255).astype(dtype)) for dtype in (np.float16, np.float64, ">f4")),
    ):
        data = load(x=given_images, y=CLASSES[: len(given_images)])
        assert data.images.dtype == (np.uint8 if wanted.dtype == np.uint8 else np.float32)
        np.testing.assert_array_equal(data.images, wanted.astype(data.images.dtype))
    for dtype in (np.uint8, np.int32, np.uint64):
        assert load(x=images, y=CLASSES.astype(dtype)[:, None]).labels.tolist() == [0, 2, 1, 2]


def test_a_table_is_taken_as_it_is(load):
    table = np.array([[18.0, -3e5], [90.0, 0.5], [0.0, 2.0]])
    inputs, labels = load(x=table, y=CLASSES[:3]).take([2, 0], bounds=(-1e6, 1e6))
    np.testing.assert_array_equal(inputs, table[[2, 0]].astype(np.float32))
    assert labels.tolist() == [1, 0]
    for odd in (table.astype(int), table * np.nan):
        with pytest.raises(DataError, match="a table"):
            load(x=odd, y=CLASSES[:3])


def test_class_names_and_object_arrays(load, tmp_path):
    class Touch:
        def __reduce__(self):
            return (tmp_path / "trace").touch, ()

    assert load(x=COLOURS, y=CLASSES, class_names=["a", "b", "c", "d"]).class_names == ("a", "b", "c", "d")
    for more, words in (
        ({"class_names": ["a", "b"]}, r"labels in 0\.\.2.*below 2"),
        ({"class_names": [1, 2, 3]}, "class_names of shape"),
        ({"y": np.array([Touch()], dtype=object)}, "allow_pickle"),
    ):
        with pytest.raises(DataError, match=words):
            load(**{"x": COLOURS, "y": CLASSES, **more})
    assert not (tmp_path / "trace").exists()


def bomb(path, *, size, shape):
    """A file whose images are zeros, of so many bytes when unpacked; the header may declare another shape."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("images.npy", "w", force_zip64=True) as entry:
            npy.write_array_header_1_0(entry, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for start in range(0, size, 2**24):
                entry.write(bytes(min(2**24, size - start)))
        with archive.open("labels.npy", "w") as entry:
            npy.write_array(entry, np.zeros(size % 1000, np.int64))


def test_a_bomb_is_refused_before_it_is_unpacked_and_zeros_are_none(tmp_path):
    path = tmp_path / "toy.npz"
    bomb(path, size=300 * 2**20, shape=(300 * 2**20, 1, 1))
    assert path.stat().st_size < 2**20
    parts = ["toy.npz: got ", "bytes that unpack to 314,57", "100 times"]
    assert peak_of(lambda: check_refused(parts, path)) < 10 * 2**20
    np.savez_compressed(path, x=np.zeros((4000, 1, 32, 32), np.uint8), y=np.zeros(4000, np.int64))
    assert len(load_dataset(str(path))) == 4000


def test_a_header_that_declares_another_size_is_refused(tmp_path):
    path, words = tmp_path / "toy.npz", ["toy.npz: got images.npy of 1000 bytes where shape", "needs"]
    for shape in ((10**12, 1, 1), (2**63, 2**63), (5, 1, 1), (-3, 1, 1)):
        bomb(path, size=1000, shape=shape)
        assert peak_of(lambda: check_refused(words, path)) < 2**22
