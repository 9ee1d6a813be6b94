"""Images in a page, read back with Pillow."""

from __future__ import annotations

import base64
import io
import sys

import numpy as np
import pytest

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.reports import Example
from robust_ext.reports.examples import panels

Image = pytest.importorskip("PIL.Image")


def decode(uri):
    head, data = uri.split(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def example(clean, candidate=None, bounds=(0.0, 1.0)):
    candidate = clean if candidate is None else candidate
    return Example(attack="pgd", sample=0, outcome="found", clean=clean, candidate=candidate, bounds=bounds)


def test_grey_images_keep_every_pixel():
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4) * 23
    shown = panels(example(pixels[None].astype(np.float32) / 255))
    np.testing.assert_array_equal(decode(shown.clean), pixels)


def test_colour_images_keep_every_pixel():
    pixels = np.random.default_rng(0).integers(0, 256, size=(5, 4, 3), dtype=np.uint8)
    clean = np.moveaxis(pixels, -1, 0) / 255
    shown = panels(example(clean, clean[:, ::-1]))
    np.testing.assert_array_equal(decode(shown.clean), pixels)
    np.testing.assert_array_equal(decode(shown.candidate), pixels[::-1])


def test_bounds_are_black_and_white():
    clean = np.array([[[-2.0, 0.0, 2.0]]])
    np.testing.assert_array_equal(decode(panels(example(clean, bounds=(-2.0, 2.0))).clean), [[0, 128, 255]])


def test_perturbation_is_scaled_to_its_largest_value():
    clean = np.full((1, 1, 4), 0.5)
    shown = panels(example(clean, clean + np.array([0.0, -0.02, 0.01, 0.02])))
    assert shown.scale == pytest.approx(0.02)
    np.testing.assert_array_equal(decode(shown.perturbation), [[128, 0, 191, 255]])
    assert shown.notes == ()


def test_no_perturbation_is_grey():
    shown = panels(example(np.ones((3, 2, 2))))
    assert shown.scale == 0
    assert set(decode(shown.perturbation).ravel().tolist()) == {128}


def test_other_channel_counts_show_the_first():
    clean = np.stack([np.full((2, 2), 0.2), np.full((2, 2), 1.0)])
    shown = panels(example(clean))
    np.testing.assert_array_equal(decode(shown.clean), np.full((2, 2), 51))
    assert shown.notes == ("first of 2 channels",)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_stand_out(channels, value):
    clean = np.full((channels, 2, 2), 0.5)
    candidate = clean.copy()
    candidate[0, 0, 1] = value
    candidate[0, 1, 1] = 0.75
    shown = panels(example(clean, candidate))
    for uri in (shown.candidate, shown.perturbation):
        pixels = decode(uri)
        assert tuple(pixels[0, 1]) == (204, 0, 153)
        assert tuple(pixels[0, 0]) == (128, 128, 128)
    assert shown.scale == 0.25
    assert shown.notes == ("values that are not finite are magenta",)


def test_values_beyond_the_bounds_are_cut_and_noted():
    clean = np.array([[[0.0, 1.0]]])
    shown = panels(example(clean, clean + np.array([-0.5, 0.5])))
    np.testing.assert_array_equal(decode(shown.candidate), [[0, 255]])
    assert shown.notes == ("values beyond the bounds are cut",)


@pytest.mark.parametrize(
    ("shape", "expected"), [((1, 2, 2), True), ((2, 2), False), ((4,), False), ((1, 0, 2), False), ((0, 2, 2), False)]
)
def test_images_are_known_by_their_shape(shape, expected):
    assert example(np.zeros(shape)).is_image is expected


def test_refuses_what_does_not_fit():
    with pytest.raises(InvalidArgumentError, match="candidate: got shape"):
        example(np.zeros((1, 2, 2)), np.zeros((1, 2, 3)))
    with pytest.raises(InvalidArgumentError, match="bounds"):
        example(np.zeros((1, 2, 2)), bounds=(1.0, 1.0))


def test_says_how_to_install_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match=r"Pillow: pip install"):
        panels(example(np.zeros((1, 2, 2))))
