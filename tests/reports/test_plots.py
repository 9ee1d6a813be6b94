"""Tables, plots and images of pages hold the numbers of the result, where they belong."""

import base64
import io
import itertools
import re

import numpy as np
import pytest

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.reports import report_page
from robust_ext.reports.pictures import panels
from tests.reports.pages import SVG, Page, ends, plot, svgs, words
from tests.reports.results import arms_of, make_attack, make_example, make_mead, make_result

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")


def test_bars_are_as_long_as_the_scores_under_names_as_they_are():
    name = "$a_1$ <b> & name-1"
    attack = make_attack(name, score=0.8, random_score=0.2, score_interval=None, random_score_interval=None)
    svg = plot(report_page(make_result([attack])), "Test score and R-ASR of each")
    assert {name, "0.800 score", "0.200 R-ASR"} <= set(words(svg))
    score, random = [right - left for left, right in ends(svg, "#0072b2|url")][:2]
    assert score / random == pytest.approx(4)


def test_the_run_itself_is_marked_on_the_hardness_curve_which_needs_scores():
    attack = make_attack("pgd")
    own = {"kappa": 0.9995, "score": attack["score"], "random_score": attack["random_score"]}
    gap = {"kappa": 0.5, "score": None, "random_score": None}
    for rows, marked in [([*attack["hardness"], own], True), ([*attack["hardness"], gap], False), ([own], True)]:
        text = report_page(make_result([make_attack("pgd", hardness=rows)]))
        (svg,) = [svg for svg in svgs(text) if "against 1 - kappa" in svg.get("aria-label")]
        assert (("0.0005" in words(svg)), ("this run" in words(svg))) == (marked, marked)
        places = {"".join(one.itertext()): float(one.get("x") or "nan") for one in svg.iter(f"{SVG}text")}
        assert len(rows) == 1 or places["0.1"] < places["0.01"], "harder settings lie to the right"
    changes = dict.fromkeys(("score", "score_interval", "random_score", "random_score_interval"))
    changes |= {"hardness": [], "depths": [], "verdict": "inconclusive", "samples": 0}
    text = report_page(make_result([make_attack("pgd", seconds=dict.fromkeys(attack["seconds"], 0.0), **changes)]))
    assert Page(text).row("pgd", "inconclusive")[:3] == ["-", "-", "-"]
    assert {"no score", "no R-ASR"} <= {word for svg in svgs(text) for word in words(svg)}
    assert not any("against 1 - kappa" in svg.get("aria-label") for svg in svgs(text))


def test_no_page_with_failures_is_headed_by_a_green_pass():
    looks = {"passed": "passed", "passed failed": "mixed", "passed failed failed inconclusive": "mixed"}
    looks |= {"failed failed": "failed", "inconclusive failed": "inconclusive"}
    for verdicts, look in looks.items():
        attacks = [make_attack(f"attack {number}", verdict=one) for number, one in enumerate(verdicts.split())]
        text = report_page(make_result(attacks, verdict=look.replace("mixed", "passed")))
        assert re.search(r'<section class="verdict (\w+)">', text)[1] == look
        counts = [str(number) for number in (verdicts.count("passed"), len(attacks))] if look == "mixed" else []
        assert re.findall(r"\d", re.search(r"<h1>(.*?)</h1>", text)[1])[:2] == counts


def test_a_curve_goes_where_its_points_are():
    result = make_mead(arms_of("Spatial"), ["nss"], samples=40)
    result["detectors"][0]["results"][0]["curve"] = {"fpr": [0.0, 0.25, 1.0], "tpr": [0.0, 0.75, 1.0]}
    paths = plot(report_page(result), "ROC curves").iter(f"{SVG}path")
    found = [path.get("d") for path in paths if "stroke-width: 2.2" in path.get("style", "")]
    every = [np.array([[float(x), float(y)] for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]) for path in found]
    # The line in the legend has the same look, and is level.
    (points,) = [points for points in every if np.ptp(points[:, 1]) > 0]
    # From the lower left to the upper right; the page's y axis points down.
    where = (points[1] - points[0]) / (points[2] - points[0])
    np.testing.assert_allclose(where, [0.25, 0.75], atol=1e-3)


def test_attribution_bars_are_as_long_as_the_shares():
    arms, shares = arms_of("l1 5"), [0.1, 0.2, 0.3, 0.4]
    result = make_mead(arms, ["nss"], samples=40, rates={"l1 5": 0.9})
    rows = result["detectors"][0]["results"]
    (whole,) = [row for row in rows if row["group"] == "l1 5" and row["objective"] is row["algorithm"] is None]
    whole["attribution"] = dict(zip([arm.name for arm in arms], shares, strict=True))
    svg = plot(report_page(result), "Attribution by group, past detector nss")
    # The key is drawn last.
    places = ends(svg, "#0072b2|#d98200|#009e73|#cc79a7|url")[:4]
    total = places[-1][1] - places[0][0]
    assert [right for _, right in places[:-1]] == pytest.approx([left for left, _ in places[1:]], abs=0.01)
    assert [(right - left) / total for left, right in places] == pytest.approx(shares, abs=1e-3)
    assert "40.0 PGD-FR" in words(svg)


GREY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 23
COLOUR = np.random.default_rng(0).integers(0, 256, size=(5, 4, 3), dtype=np.uint8)
COLOUR_INPUT = np.moveaxis(COLOUR, -1, 0) / 255
FLIPPED = COLOUR_INPUT[:, ::-1]
FAR = np.abs(COLOUR_INPUT - FLIPPED).max()
TWO_CHANNELS = np.stack([np.full((2, 2), 0.2), np.full((2, 2), 1.0)])
HALF, MOVES = np.full((1, 1, 4), 0.5), np.array([0.0, -0.02, 0.01, 0.02])
CUT = "values beyond the bounds are cut"
EDGES, FULL = np.array([[[0.0, 1.0]]]), np.full((1, 4), 255)


def decode(uri):
    data = uri.removeprefix("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=["PNG"]))


SHOWN = {"planted": FULL, "planted - input": FULL, "candidate - input": [[128, 122, 130, 133]]}
PIXELS = [
    ({"clean": GREY[None].astype(np.float32) / 255}, {"input": GREY}, 0, ()),
    ({"clean": COLOUR_INPUT, "candidate": FLIPPED}, {"input": COLOUR, "candidate": COLOUR[::-1]}, FAR, ()),
    ({"clean": np.array([[[-2.0, 0.0, 2.0]]]), "bounds": (-2.0, 2.0)}, {"input": [[0, 128, 255]]}, 0, ()),
    # What is planted is shown as what an attack makes of it is, on one scale.
    ({"clean": HALF, "candidate": HALF + MOVES, "planted": HALF + 0.5}, SHOWN, 0.5, ()),
    # The difference is scaled to its largest value; none is grey.
    ({"clean": HALF, "candidate": HALF + MOVES}, {"candidate - input": [[128, 0, 191, 255]]}, 0.02, ()),
    ({"clean": np.ones((3, 2, 2))}, {"candidate - input": np.full((2, 2, 3), 128)}, 0, ()),
    ({"clean": TWO_CHANNELS}, {"input": np.full((2, 2), 51)}, 0, ("first of 2 channels",)),
    ({"clean": EDGES, "candidate": EDGES * 2 - 0.5}, {"candidate": [[0, 255]]}, 0.5, (CUT,)),
]


def test_pixels_are_those_of_the_input():
    for changes, images, scale, notes in PIXELS:
        found = panels(make_example(**changes))
        for name, pixels in images.items():
            np.testing.assert_array_equal(decode(found.images[name]), pixels)
        assert found.scale == pytest.approx(scale)
        assert found.notes == notes


def test_values_that_are_not_finite_stand_out():
    for channels, value in itertools.product((1, 3), (np.nan, -np.inf)):
        clean = np.full((channels, 2, 2), 0.5)
        candidate = clean.copy()
        candidate[0, 0, 1], candidate[0, 1, 1] = value, 0.75
        found = panels(make_example(clean=clean, candidate=candidate))
        for name in ("candidate", "candidate - input"):
            assert decode(found.images[name])[0].tolist() == [[128, 128, 128], [204, 0, 153]]
        assert (found.scale, found.notes) == (0.25, ("values that are not finite are magenta",))


def test_inputs_that_are_no_images_are_left_out_and_misfits_refused():
    shapes = {(1, 2, 2): True, (2, 2): False, (4,): False, (1, 0, 2): False, (0, 2, 2): False}
    assert {shape: make_example(clean=np.zeros(shape)).is_image for shape in shapes} == shapes
    flat, misfit = np.zeros((1, 2, 2)), np.zeros((1, 2))
    for changes in ({"candidate": misfit}, {"clean": flat, "planted": misfit}, {"bounds": (1.0, 1.0)}):
        with pytest.raises(InvalidArgumentError, match=next(reversed(changes))):
            make_example(**changes)
    page = Page(report_page(make_result([make_attack("pgd")]), [make_example(clean=np.zeros(5)), make_example()]))
    assert len(re.findall("image/png", str(page.attributes))) == 3
