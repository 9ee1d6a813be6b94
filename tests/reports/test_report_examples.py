"""Images in a page, read back with Pillow."""

import base64
import io

import numpy as np
import pytest

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.reports.pictures import panels
from tests.reports.results import make_example

Image = pytest.importorskip("PIL.Image")

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 23
COLOUR = np.random.default_rng(0).integers(0, 256, size=(5, 4, 3), dtype=np.uint8)
COLOUR_INPUT = np.moveaxis(COLOUR, -1, 0) / 255
FLIPPED = COLOUR_INPUT[:, ::-1]
FAR = np.abs(COLOUR_INPUT - FLIPPED).max()
TWO_CHANNELS = np.stack([np.full((2, 2), 0.2), np.full((2, 2), 1.0)])
HALF = np.full((1, 1, 4), 0.5)
MOVES = np.array([0.0, -0.02, 0.01, 0.02])
EDGES = np.array([[[0.0, 1.0]]])
CUT = "values beyond the bounds are cut"


def decode(uri):
    head, data = uri.split(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
        assert image.format == "PNG"
        return np.asarray(image)


@pytest.mark.parametrize(
    ("changes", "images", "scale", "notes"),
    [
        ({"clean": GREY[None].astype(np.float32) / 255}, {"input": GREY}, 0, ()),
        ({"clean": COLOUR_INPUT, "candidate": FLIPPED}, {"input": COLOUR, "candidate": COLOUR[::-1]}, FAR, ()),
        ({"clean": np.array([[[-2.0, 0.0, 2.0]]]), "bounds": (-2.0, 2.0)}, {"input": [[0, 128, 255]]}, 0, ()),
        # What is planted is shown as what an attack makes of it is, on one scale.
        (
            {"clean": HALF, "candidate": HALF + MOVES, "planted": HALF + 0.5},
            {
                "planted": np.full((1, 4), 255),
                "planted - input": np.full((1, 4), 255),
                "candidate - input": [[128, 122, 130, 133]],
            },
            0.5,
            (),
        ),
        # The difference is scaled to its largest value; none is grey.
        ({"clean": HALF, "candidate": HALF + MOVES}, {"candidate - input": [[128, 0, 191, 255]]}, 0.02, ()),
        ({"clean": np.ones((3, 2, 2))}, {"candidate - input": np.full((2, 2, 3), 128)}, 0, ()),
        ({"clean": TWO_CHANNELS}, {"input": np.full((2, 2), 51)}, 0, ("first of 2 channels",)),
        ({"clean": EDGES, "candidate": EDGES * 2 - 0.5}, {"candidate": [[0, 255]]}, 0.5, (CUT,)),
    ],
)
def test_pixels_are_those_of_the_input(changes, images, scale, notes):
    shown = panels(make_example(**changes))
    for name, pixels in images.items():
        np.testing.assert_array_equal(decode(shown.images[name]), pixels)
    assert shown.scale == pytest.approx(scale)
    assert shown.notes == notes


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_stand_out(channels, value):
    clean = np.full((channels, 2, 2), 0.5)
    candidate = clean.copy()
    candidate[0, 0, 1] = value
    candidate[0, 1, 1] = 0.75
    shown = panels(make_example(clean=clean, candidate=candidate))
    for uri in (shown.images["candidate"], shown.images["candidate - input"]):
        pixels = decode(uri)
        assert tuple(pixels[0, 1]) == (204, 0, 153)
        assert tuple(pixels[0, 0]) == (128, 128, 128)
    assert shown.scale == 0.25
    assert shown.notes == ("values that are not finite are magenta",)


def test_images_are_known_by_their_shape_and_misfits_refused():
    shapes = {(1, 2, 2): True, (2, 2): False, (4,): False, (1, 0, 2): False, (0, 2, 2): False}
    assert {shape: make_example(clean=np.zeros(shape)).is_image for shape in shapes} == shapes
    flat, misfit = np.zeros((1, 2, 2)), np.zeros((1, 2))
    for changes in ({"candidate": misfit}, {"clean": flat, "planted": misfit}, {"bounds": (1.0, 1.0)}):
        with pytest.raises(InvalidArgumentError, match=next(reversed(changes))):
            make_example(**changes)
