"""Folders of images, GTSRB and SVHN, in small files that are made here."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from robust_ext.datasets import load_dataset
from tests.datasets.files import check_refused, write

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


def test_splits(tmp_path):
    for split, value in (("train", 1), ("test", 2)):
        save(tmp_path / split / "a" / "0.png", np.full((4, 4), value, np.uint8))
    train = load_dataset(str(tmp_path), split="train")
    assert (train.images.max(), train.name) == (1, f"{tmp_path.name}-train")
    assert load_dataset(str(tmp_path)).images.max() == 2
    assert load_dataset(str(tmp_path / "test"), split="train").images.max() == 2


def pcx():
    """A whole image of a format that is not among those decoded."""
    file = io.BytesIO()
    Image.fromarray(pixels(3)).save(file, format="PCX")
    return file.getvalue()


def bomb(side):
    """A PNG whose header states that it is huge."""
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
    """Images of several sizes, each of one colour, and their table."""
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


@pytest.mark.parametrize("line", ["../other.ppm;1;1;0;0;0;0;3", "a.ppm;1;1;0;0;0;0;x", "a.ppm", ""])
def test_tables_that_are_damaged_or_lead_elsewhere_are_refused(tmp_path, line):
    (tmp_path / "Final_Test/Images").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "Final_Test/other.ppm")
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
