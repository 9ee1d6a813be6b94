"""GTSRB and SVHN, in small files that are made here."""

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from robust_ext.datasets import load_dataset
from tests.datasets.files import check_refused, write

RNG = np.random.default_rng(0)
HEAD = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n"


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


@pytest.mark.parametrize("split", ["train", "test"])
def test_house_numbers(tmp_path, split):
    images = RNG.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    savemat(tmp_path / f"{split}_32x32.mat", {"X": images, "y": np.array([[10], [1], [9], [5]], np.uint8)})
    data = load_dataset("svhn", root=tmp_path, split=split)
    assert (data.name, data.class_names, data.labels.tolist()) == (f"svhn-{split}", tuple("0123456789"), [0, 1, 9, 5])
    for number in range(4):
        np.testing.assert_array_equal(data.images[number].transpose(1, 2, 0), images[..., number])


@pytest.mark.parametrize("packed", [False, True])
def test_other_arrays_and_damage_are_refused(tmp_path, packed):
    path, images = tmp_path / "test_32x32.mat", np.zeros((32, 32, 3, 2), np.uint8)
    for arrays in (
        {"X": images},
        {"X": images.astype(float), "y": np.ones((2, 1), np.uint8)},
        {"X": images, "y": np.zeros((2, 1), np.uint8)},
        {"X": images, "y": np.ones((3, 1), np.uint8)},
        {"X": images, "y": np.array([["a"], ["b"]], dtype=object)},
    ):
        savemat(path, arrays, do_compression=packed)
        check_refused([path, "unsigned bytes"], "svhn", root=tmp_path)
    savemat(path, {"X": images, "y": np.ones((2, 1), np.uint8)}, do_compression=packed)
    content = path.read_bytes()
    for damaged in (content[:200], content[:-9], b"", b"\x80\x04}." * 90):
        write(path, damaged)
        check_refused([path, "unsigned bytes"], "svhn", root=tmp_path)
