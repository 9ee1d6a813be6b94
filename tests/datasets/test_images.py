"""CIFAR, folders of images, GTSRB and SVHN: round trips, damage, and pickles that do more than hold a batch."""

import io
import os
import pickle
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from robust_ext.core.errors import DataError
from robust_ext.datasets import load_dataset
from robust_ext.datasets.cifar import read_batch
from tests.datasets.test_arrays import check_refused, write


def rows_of(count, *, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def records(rows, *label_columns):
    return np.column_stack([*label_columns, rows]).astype(np.uint8).tobytes()


def batch(rows, labels, *, key="labels", keys_as=str.encode):
    names = [f"{i}.png" for i in range(len(rows))]
    content = {"batch_label": "testing batch 1 of 1", key: labels, "data": rows, "filenames": names}
    return pickle.dumps({keys_as(name): value for name, value in content.items()}, protocol=2)


def python2_batch(rows, labels):
    """The very opcodes of the original files: byte strings of Python 2, arrays of numpy 1."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def integer(value):
        return b"K" + bytes([value])

    values = rows.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + integer(0) + b"\x85" + text(b"b") + b"\x87R"
        b"(" + integer(1) + integer(len(rows)) + b"M\x00\x0c\x86"
        b"cnumpy\ndtype\n" + text(b"u1") + integer(0) + integer(1) + b"\x87R"
        b"(" + integer(3) + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff" + integer(0) + b"tb"
        b"\x89T" + struct.pack("<i", len(values)) + values + b"tb"
    )
    listed = b"](" + b"".join(map(integer, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


CASES = [
    *(
        ("cifar10", f"{folder}/test_batch.bin", records)
        for folder in ("", "cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin")
    ),
    *(
        ("cifar10", f"{folder}/test_batch", write_batch)
        for folder in ("", "cifar10/cifar-10-batches-py")
        for write_batch in (batch, python2_batch, lambda *given: batch(*given, keys_as=str))
    ),
    ("cifar10", "test_batch", lambda rows, labels: batch(np.asfortranarray(rows), labels)),
    *(
        ("cifar100", f"cifar-100-binary/{split}.bin", lambda rows, labels: records(rows, [19, 4, 7], labels))
        for split in ("test", "train")
    ),
    ("cifar100", "cifar-100-python/test", lambda rows, labels: batch(rows, labels, key="fine_labels")),
]


@pytest.mark.parametrize(("name", "file", "write_batch"), CASES)
def test_files_of_every_version(tmp_path, name, file, write_batch):
    rows, split = rows_of(3), "train" if "train" in file else "test"
    labels, names = {
        "cifar10": ([9, 0, 3], ["truck", "airplane", "cat"]),
        "cifar100": ([99, 0, 5], ["worm", "apple", "bed"]),
    }[name]
    write(tmp_path / file.removeprefix("/"), write_batch(rows, labels))
    data = load_dataset(name, root=tmp_path, split=split)
    assert (data.name, data.images.shape, data.images.dtype) == (f"{name}-{split}", (3, 3, 32, 32), np.uint8)
    np.testing.assert_array_equal(data.images.reshape(3, -1), rows)
    assert (data.labels.tolist(), [data.class_names[label] for label in labels]) == (labels, names)
    assert (data.classes, data.take([0])[0].shape) == (100 if name == "cifar100" else 10, (1, 3, 32, 32))


@pytest.mark.parametrize("binary", [True, False])
def test_training_batches_in_order(tmp_path, binary):
    parts = [rows_of(2, seed=i) for i in range(5)]
    folder = tmp_path / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    for i, rows in enumerate(parts, start=1):
        content = records(rows, [i, 0]) if binary else batch(rows, [i, 0])
        write(folder / (f"data_batch_{i}" + (".bin" if binary else "")), content)
    data = load_dataset("cifar10", root=tmp_path, split="train")
    np.testing.assert_array_equal(data.images.reshape(10, -1), np.concatenate(parts))
    assert data.labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    next(folder.glob("data_batch_3*")).unlink()
    check_refused(["data_batch_3", "got no such file"], "cifar10", root=tmp_path, split="train")


class Runs:
    """Unpickled in the usual way, it calls what it was made with."""

    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_pickle_that_runs_a_command_is_refused_and_has_no_effect(tmp_path, protocol):
    trace = tmp_path / "trace"
    content = pickle.dumps({b"data": Runs(os.system, f"touch {trace}"), b"labels": []}, protocol=protocol)
    write(tmp_path / "test_batch", content)
    parts = (tmp_path / "test_batch", f"a pickle that refers to {os.system.__module__}.system", "nothing of it")
    check_refused(parts, "cifar10", root=tmp_path)
    assert not trace.exists()
    pickle.loads(content)  # noqa: S301 - shows that the pickle above would have run
    assert trace.exists()


OTHERS = [Runs(eval, "1"), Runs(getattr, "a", "upper"), Runs(__import__, "os"), np.dtype, np.load, np.uint8(3)]
OTHERS += [np.zeros(2, object), np.zeros((2, 3072), np.int64), np.zeros(2, "V8"), np.random.default_rng(0)]


def test_pickles_of_anything_else_are_refused(tmp_path):
    for value in OTHERS:
        write(tmp_path / "test_batch", pickle.dumps({b"data": value, b"labels": [0, 1]}, protocol=2))
        check_refused(["test_batch: got "], "cifar10", root=tmp_path)


PROGRAMS = [
    b"cnumpy\ndtype\n}U\x08__call__K\x01sb",
    b"cnumpy\ndtype\n(N}U\x08__call__K\x01stb",
    b"c_codecs\nencode\n(N}U\x09__class__cnumpy\ndtype\nstb",
    b"cnumpy.core.multiarray\n_reconstruct\n(N}U\x01xK\x01stb",
    b"cnumpy\ndtype.__class__\n",
    b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__class__\x93",
    b"Psomething\n",
    b"c_codecs\nencode\nU\x01aU\x03zip\x86R",
    b"c_codecs\nencode\nV1\nVrot13\n\x86R",
    b"cnumpy.core.multiarray\n_reconstruct\nU\x01aK\x00K\x00\x87R",
]


def test_pickles_cannot_change_what_reads_them(tmp_path):
    """Each program is followed by a whole batch, so that only a refusal raises."""
    path, whole = tmp_path / "test_batch", python2_batch(rows_of(1), [1])
    for program in PROGRAMS:
        write(path, program + b"0" + whole)
        with pytest.raises(DataError):
            read_batch(path, "labels")
    write(path, b"K\x000" + whole)
    assert read_batch(path, "labels")[1].tolist() == [1]


def test_a_damaged_memo_reserves_no_memory(tmp_path):
    for put in (b"r\xff\xff\xff\x7f", b"p999999999\n", b"r\x00\x00\x00\x01"):
        write(tmp_path / "test_batch", b"K\x00" + put + b"0" + python2_batch(rows_of(1), [1]))
        check_refused(["in the memo of a pickle that has used at most 1"], "cifar10", root=tmp_path)


@given(st.data())
def test_damaged_pickles_give_a_batch_or_a_data_error(tmp_path_factory, data):
    content = bytearray(python2_batch(rows_of(1), [1]))
    for _ in range(data.draw(st.integers(1, 4))):
        # The pixels are most of the file and harm nobody: change what stands around them.
        position = data.draw(st.integers(0, 175)) - data.draw(st.sampled_from([0, 25]))
        content[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        rows, _ = read_batch(path, "labels")
    except DataError:
        return
    assert rows.shape[1:] == (3072,)


def test_labels_that_do_not_fit_are_named(tmp_path):
    for labels, words in (([0, 10], "labels in 0..10"), ([0], "shape (1,)"), ([0, 2**70], "")):
        write(tmp_path / "test_batch", batch(rows_of(2), labels))
        check_refused([tmp_path / "test_batch", words], "cifar10", root=tmp_path)


RNG = np.random.default_rng(0)
HEAD = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n"


def pixels(*channels, size=(6, 5)):
    return RNG.integers(0, 256, (*size, *channels), dtype=np.uint8)


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


@pytest.mark.parametrize("suffix", ["png", "PNG", "bmp", "tiff", "ppm", "jpg"])
def test_colour_images_in_the_order_of_their_names(tmp_path, suffix):
    arrays = {name: pixels(3) for name in ("cat/1", "ant/2", "cat/0", "ant/10")}
    if suffix == "jpg":
        arrays = {name: np.full_like(array, array[0, 0]) for name, array in arrays.items()}
    for name, array in arrays.items():
        save(tmp_path / f"{name}.{suffix}", array)
    data = load_dataset(str(tmp_path))
    assert (data.class_names, data.labels.tolist(), data.name) == (("ant", "cat"), [0, 0, 1, 1], tmp_path.name)
    assert (data.images.shape, data.images.dtype) == ((4, 3, 6, 5), np.uint8)
    wanted = np.stack([arrays[name] for name in ("ant/10", "ant/2", "cat/0", "cat/1")]).transpose(0, 3, 1, 2)
    assert abs(data.images.astype(int) - wanted).max() <= (3 if suffix == "jpg" else 0)


def test_grey_images_stay_grey_unless_mixed_and_other_sizes_and_depths_are_refused(tmp_path):
    grey, colour, first, other = pixels(), pixels(3), tmp_path / "a" / "0.png", tmp_path / "b" / "1.png"
    save(first, grey)
    np.testing.assert_array_equal(load_dataset(str(tmp_path)).images, grey[None, None])
    save(tmp_path / "a" / "1.png", colour)
    data = load_dataset(str(tmp_path))
    np.testing.assert_array_equal(data.images, np.stack([np.stack([grey] * 3), colour.transpose(2, 0, 1)]))
    save(other, pixels(size=(6, 7)))
    check_refused([f"{other}: got 7 x 6 pixels, expected 5 x 6 as in {first}; resize"], tmp_path)
    save(first, np.full((4, 4), 40_000, np.uint16))
    check_refused(["0.png: got pixels of mode I;16, expected 8 bits"], tmp_path)


def pcx():
    file = io.BytesIO()
    Image.fromarray(pixels(3)).save(file, format="PCX")
    return file.getvalue()


def bomb(side):
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    packed = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


DAMAGE = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "overwritten": lambda content: content[:60] + b"\0" * 40 + content[100:],
    "another format": lambda content: pcx(),
    "bomb": lambda content: bomb(12_000),
    "larger bomb": lambda content: bomb(60_000),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_images_are_named(tmp_path, damage):
    for name in ("0.png", "1.png"):
        save(tmp_path / "a" / name, pixels(3))
    path = tmp_path / "a" / "1.png"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with warnings.catch_warnings():
        # Refused whatever the caller does with Pillow's warnings.
        warnings.simplefilter("ignore")
        check_refused(["1.png: got an error while decoding ", "replace the file or remove it"], tmp_path)
    path.unlink()
    assert len(load_dataset(str(tmp_path))) == 1


def signs(folder, entries, table):
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, label, colour, size in entries:
        Image.new("RGB", size, colour).save(folder / name)
        lines.append(f"{name};{size[0]};{size[1]};5;5;20;20;{label}\n")
    table.write_text(HEAD + "".join(lines))


@pytest.mark.parametrize(
    ("images", "table"),
    [
        ("gtsrb/GTSRB/Final_Test/Images", "gtsrb/GT-final_test.csv"),
        ("GTSRB/Final_Test/Images", "GTSRB/Final_Test/Images/GT-final_test.csv"),
        ("Final_Test/Images", "GT-final_test.csv"),
    ],
)
def test_signs_for_tests_are_in_the_order_of_their_table(tmp_path, images, table):
    entries = [("00001.ppm", 42, (9, 80, 200), (33, 51)), ("00000.ppm", 3, (250, 0, 7), (16, 16))]
    signs(tmp_path / images, entries, tmp_path / table)
    data = load_dataset("gtsrb", root=tmp_path)
    assert (data.name, data.classes, data.labels.tolist()) == ("gtsrb-test", 43, [42, 3])
    assert (data.images.shape, data.images.dtype) == ((2, 3, 32, 32), np.uint8)
    for image, (_, _, colour, _) in zip(data.images, entries, strict=True):
        assert (image == np.array(colour)[:, None, None]).all()


def test_signs_for_training_are_one_folder_a_class(tmp_path):
    top = tmp_path / "gtsrb/GTSRB/Training"
    for label in range(43):
        folder = top / f"{label:05}"
        signs(folder, [("00000_00000.ppm", label, (label, 0, 0), (20, 20))], folder / f"GT-{label:05}.csv")
    data = load_dataset("gtsrb", root=tmp_path, split="train")
    assert data.labels.tolist() == data.images[:, 0, 0, 0].tolist() == list(range(43))
    check_refused(["gtsrb (test)", "no files found"], "gtsrb", root=tmp_path)
    (top / "00007" / "GT-00007.csv").unlink()
    check_refused(["00007", "no such file"], "gtsrb", root=tmp_path, split="train")


def test_tables_that_are_damaged_or_lead_elsewhere_are_refused(tmp_path):
    (tmp_path / "Final_Test/Images").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "Final_Test/other.ppm")
    for line in ("../other.ppm;1;1;0;0;0;0;3", "a.ppm;1;1;0;0;0;0;x", "a.ppm", ""):
        (tmp_path / "GT-final_test.csv").write_text(HEAD + line + "\n")
        check_refused(["GT-final_test.csv", "Filename;...;ClassId"], "gtsrb", root=tmp_path)


@pytest.mark.parametrize(("split", "packed"), [("test", False), ("train", True)])
def test_house_numbers_and_other_arrays_and_damage(tmp_path, split, packed):
    path, images = tmp_path / f"{split}_32x32.mat", pixels(3, 4, size=(32, 32))
    labels = np.array([[10], [1], [9], [5]], np.uint8)

    def saved(**arrays):
        savemat(path, arrays, do_compression=packed)

    saved(X=images, y=labels)
    data = load_dataset("svhn", root=tmp_path, split=split)
    assert (data.name, data.class_names, data.labels.tolist()) == (f"svhn-{split}", tuple("0123456789"), [0, 1, 9, 5])
    np.testing.assert_array_equal(data.images, images.transpose(3, 2, 0, 1))
    content = path.read_bytes()
    for damaged in (content[:200], content[:-9], b"", b"\x80\x04}." * 90):
        write(path, damaged)
        check_refused([path, "unsigned bytes"], "svhn", root=tmp_path, split=split)
    for arrays in (
        {},
        {"X": images.astype(float), "y": labels},
        {"y": labels * 0},
        {"y": labels[:3]},
        {"y": np.array([["a"]] * 4, dtype=object)},
    ):
        saved(**{"X": images, **arrays})
        check_refused([path, "unsigned bytes"], "svhn", root=tmp_path, split=split)
