"""Folders of images."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from robust_ext.datasets import load_dataset
from tests.datasets.files import check_refused

RNG = np.random.default_rng(0)


def pixels(channels, *, size=(6, 5)):
    return RNG.integers(0, 256, (*size, channels) if channels > 1 else size, dtype=np.uint8)


def write(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


@pytest.mark.parametrize("suffix", ["png", "PNG", "bmp", "tiff", "ppm"])
def test_colour_images_in_the_order_of_their_names(tmp_path, suffix):
    arrays = {name: pixels(3) for name in ("cat/1", "ant/2", "cat/0", "ant/10")}
    for name, array in arrays.items():
        write(tmp_path / f"{name}.{suffix}", array)
    data = load_dataset(str(tmp_path))
    assert (data.class_names, data.labels.tolist(), data.name) == (("ant", "cat"), [0, 0, 1, 1], tmp_path.name)
    assert (data.images.shape, data.images.dtype) == ((4, 3, 6, 5), np.uint8)
    for image, name in zip(data.images, ("ant/10", "ant/2", "cat/0", "cat/1"), strict=True):
        np.testing.assert_array_equal(image.transpose(1, 2, 0), arrays[name])


def test_jpeg(tmp_path):
    write(tmp_path / "a" / "0.jpg", np.full((6, 5, 3), (200, 100, 50), np.uint8))
    image = load_dataset(str(tmp_path)).images[0]
    assert abs(image.astype(int) - np.array([200, 100, 50]).reshape(3, 1, 1)).max() <= 3


def test_grey_images_stay_grey_unless_mixed(tmp_path):
    grey, colour = pixels(1), pixels(3)
    write(tmp_path / "a" / "0.png", grey)
    data = load_dataset(str(tmp_path))
    np.testing.assert_array_equal(data.images, grey[None, None])
    write(tmp_path / "a" / "1.png", colour)
    write(tmp_path / "a" / "2.png", grey)
    data = load_dataset(str(tmp_path))
    np.testing.assert_array_equal(data.images[0], np.stack([grey] * 3))
    np.testing.assert_array_equal(data.images[1], colour.transpose(2, 0, 1))


def test_splits(tmp_path):
    for split, value in (("train", 1), ("test", 2)):
        write(tmp_path / split / "a" / "0.png", np.full((4, 4), value, np.uint8))
    assert load_dataset(str(tmp_path)).images.max() == 2
    train = load_dataset(str(tmp_path), split="train")
    assert (train.images.max(), train.name) == (1, f"{tmp_path.name}-train")
    assert load_dataset(str(tmp_path / "test"), split="train").images.max() == 2


def test_other_sizes_and_depths(tmp_path):
    write(tmp_path / "a" / "0.png", pixels(1))
    write(tmp_path / "b" / "1.png", pixels(1, size=(6, 7)))
    first, second = tmp_path / "a" / "0.png", tmp_path / "b" / "1.png"
    check_refused([f"{second}: got 7 x 6 pixels, expected 5 x 6 as in {first}; resize"], tmp_path)
    write(first, np.full((4, 4), 40_000, np.uint16))
    check_refused(["0.png: got pixels of mode I;16, expected 8 bits"], tmp_path)


def pcx():
    """A whole image of a format that is not among those decoded."""
    file = io.BytesIO()
    Image.fromarray(pixels(3)).save(file, format="PCX")
    return file.getvalue()


def bomb(width, height):
    """A PNG whose header states that it is huge."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    packed = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:60] + b"\0" * 40 + content[100:],
        lambda content: pcx(),
        lambda content: bomb(12_000, 12_000),
        lambda content: bomb(60_000, 60_000),
    ],
    ids=["empty", "cut", "overwritten", "another format", "bomb", "larger bomb"],
)
def test_damaged_images_are_named(tmp_path, damage):
    for name in ("0.png", "1.png"):
        write(tmp_path / "a" / name, pixels(3))
    path = tmp_path / "a" / "1.png"
    path.write_bytes(damage(path.read_bytes()))
    with warnings.catch_warnings():
        # Refused whatever the caller does with Pillow's warnings.
        warnings.simplefilter("ignore")
        check_refused(["1.png: got an error while decoding ", "replace the file or remove it"], tmp_path)
    path.unlink()
    assert len(load_dataset(str(tmp_path))) == 1
