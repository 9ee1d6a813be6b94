"""The page of a MEAD result: tables, heat maps, curves and bars hold the numbers of the result."""

import re

import numpy as np
import pytest

from robust_ext.core.wording import typed
from robust_ext.evaluations.mead import MeadResult
from robust_ext.reports import report_page, report_text
from robust_ext.reports.mead_detector import heat_maps
from robust_ext.reports.mead_rows import lowest_row
from tests.reports.mead_results import arms_of, make, small_result
from tests.reports.pages import Page, ends, plot, svgs, words
from tests.reports.results import every_float, shown

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def small():
    return small_result()


def entry(detector, group, **keys):
    keys = {"group": group, "scenario": "blind", "objective": None, "algorithm": None, **keys}
    (row,) = [row for row in (*detector["results"], *detector["white_box"]) if keys.items() <= row.items()]
    return row


def cells_of(heat):
    """The norm, the names of rows, and the cells by column of a heat map."""
    rows = heat.cells
    columns = dict(zip(heat.columns, zip(*rows, strict=True), strict=True))
    norm = next(iter(columns))
    return norm, [cell.text for cell in columns.pop(norm)], columns


def test_every_share_is_one_of_the_result_and_the_page_is_not_too_large(large):
    text = report_page(large)
    page = Page(text)
    cells = [cell for row in page.rows for cell in row[1:] for cell in re.findall(r"(?<![\d.,])\d+\.\d(?![\d.])", cell)]
    sizes = {f"{value:.1f}" for value in every_float(large)} | {
        f"{arm['epsilon']:g}" for arm in large["arms"] if arm["epsilon"]
    }
    assert len(cells) > 1500
    assert {*cells} <= {*map(shown, every_float(large))} | sizes
    assert len(text.encode()) < 1_000_000


def test_heat_maps_hold_every_arm_once(large):
    """Cells with few positives have no colour."""
    for detector in large["detectors"]:
        maps = [cells_of(heat) for heat in heat_maps(large, detector)]
        cells = [cell for *_, columns in maps for column in columns.values() for cell in column if cell.text]
        title = "{}: AUROC {}, {} positives"
        expected = [title.format(row["arm"], shown(row["auroc"]), row["positives"]) for row in detector["arms"]]
        assert sorted(cell.hint for cell in cells) == sorted(expected)
        rough = {row["arm"] for row in detector["arms"] if row["positives"] < 20}
        assert {cell.hint.split(": AUROC")[0] for cell in cells if cell.look == "rough"} == rough
        assert [norm for norm, *_ in maps] == ["l1", "l2", "linf", "no norm"]
        for arm in large["arms"]:
            if arm["name"] in {row["arm"] for row in detector["arms"]} and arm["epsilon"] is not None:
                (columns,) = [columns for norm, _, columns in maps if norm == arm["norm"]]
                column = columns[typed(arm["epsilon"])]
                assert sum(cell.hint.startswith(f"{arm['name']}: ") for cell in column) == 1


def test_a_curve_goes_where_its_points_are():
    result = make(arms_of("Spatial"), ["nss"], samples=40)
    whole = result["detectors"][0]["results"][0]
    whole["curve"] = {"fpr": [0.0, 0.25, 1.0], "tpr": [0.0, 0.75, 1.0]}
    svg = plot(report_page(result), "ROC curves")
    paths = svg.iter("{http://www.w3.org/2000/svg}path")
    found = [path.get("d") for path in paths if "stroke-width: 2.2" in path.get("style", "")]
    every = [np.array([[float(x), float(y)] for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]) for path in found]
    # The line in the legend has the same look, and is level.
    (points,) = [points for points in every if np.ptp(points[:, 1]) > 0]
    # From the lower left to the upper right; the page's y axis points down.
    where = (points[1] - points[0]) / (points[2] - points[0])
    np.testing.assert_allclose(where, [0.25, 0.75], atol=1e-3)


def test_attribution_bars_are_as_long_as_the_shares():
    arms = arms_of("l1 5")
    result = make(arms, ["nss"], samples=40, rates={"l1 5": 0.9})
    whole = entry(result["detectors"][0], "l1 5")
    names = [arm.name for arm in arms]
    whole["attribution"] = dict(zip(names, [0.1, 0.2, 0.3, 0.4], strict=True))
    svg = plot(report_page(result), "Attribution by group, past detector nss")
    # The key is drawn last.
    places = ends(svg, "#0072b2|#d98200|#009e73|#cc79a7|url")[:4]
    lengths = [right - left for left, right in places]
    total = sum(lengths)
    assert [right for _, right in places[:-1]] == pytest.approx([left for left, _ in places[1:]], abs=0.01)
    assert [length / total for length in lengths] == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-3)
    assert "40.0 PGD-FR" in words(svg)


def test_the_lowest_row_is_one_with_enough_positives_if_any():
    rows = [{"positives": many, "auroc": auroc} for many, auroc in ((3, 0.1), (19, None), (20, 0.4), (90, 0.6))]
    assert lowest_row([*rows, None]) == rows[2]
    assert lowest_row(rows[:2]) == rows[0]


def test_arms_adaptive_to_the_detector_have_rows_of_their_own(small):
    maps = {norm: (names, columns) for norm, names, columns in map(cells_of, heat_maps(small, small["detectors"][1]))}
    names, columns = maps["linf"]
    assert names[-1] == "PGD-ACE (white-box)"
    expected = [f"PGD-ACE {group}, knowing lid" for group in ("linf 0.125", "linf 0.3125")]
    assert [column[-1].hint.split(":")[0] for column in columns.values()] == expected
    assert "white-box" not in str(cells_of(heat_maps(small, small["detectors"][0])[1])[1])


def test_without_positives():
    rates = {"l1 5": 0, "linf 0.125": 0, "Spatial": 0}
    text = report_page(make(arms_of(*rates), ["nss", "lid"], samples=30, white_box=["nss"], rates=rates))
    assert Page(text).row("nss") == ["-"] * 8, "there is no number of the detector"
    assert not [svg for svg in svgs(text) if svg.get("aria-label", "").startswith(("ROC", "Attribution"))]
    assert "no AUROC" in words(plot(text, "Mean AUROC"))


def test_numbers_of_the_public_code():
    arms = arms_of("linf 0.5")
    for published in (True, False):
        result = make(arms, ["nss"], samples=50, published=published)
        numbers = entry(result["detectors"][0], "linf 0.5").get("published") or {}
        words = " / ".join(shown(numbers.get(key)) for key in ("auroc", "fpr_at_95_tpr"))
        text, page = report_text(result), Page(report_page(result))
        assert (words in text) == (words in page.rows_of("linf 0.5")[0]) == published


def test_the_headline_has_the_lowest_of_all_arms_that_count():
    """White-box arms too, whatever the mean over the others is."""
    content = small_result()
    for detector in content["detectors"]:
        for row in detector["white_box"]:
            if row["auroc"] is not None and row["scenario"] == "white-box":
                row["auroc"] = 0.048
    found = MeadResult(content).headline
    known = [one for one in content["detectors"] if any(row["auroc"] == 0.048 for row in one["white_box"])]
    assert known
    assert found.count("lowest 4.8") == len(known)
    headline = re.search(r"<h1>(.*?)</h1>", report_page(content))[1]
    assert all(f"{one['name']} 4.8" in headline for one in known)
