"""The page of a MEAD result: tables, heat maps, curves and bars hold the numbers of the result."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest

from robust_ext.evaluations.mead import MeadResult
from robust_ext.reports import report_page, report_text
from robust_ext.reports.mead_page import heat_maps
from robust_ext.reports.wording import typed
from tests.reports.mead_results import arms_of, make, small_result
from tests.reports.pages import Page, plot, spans, svgs, words
from tests.reports.results import every_float, shown

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def small():
    return small_result()


@pytest.fixture(scope="module")
def small_page(small):
    return report_page(small)


def entry(detector, group, **keys):
    keys = {"group": group, "scenario": "blind", "objective": None, "algorithm": None, **keys}
    (row,) = [row for row in (*detector["results"], *detector["white_box"]) if keys.items() <= row.items()]
    return row


def cells_of(heat):
    return [cell for _, row in heat.rows for cell in row if cell is not None]


def test_every_share_is_one_of_the_result_and_the_page_is_not_too_large(large):
    text = report_page(large)
    page = Page(text)
    assert len(page.data) > 1500
    assert set(page.data) <= every_float(large)
    assert len(text.encode()) < 1_000_000


def test_heat_maps_hold_every_arm_once(large):
    for detector in large["detectors"]:
        maps = heat_maps(large, detector)
        cells = [cell for heat in maps for cell in cells_of(heat)]
        assert len(cells) == len(detector["arms"])
        title = "{}: AUROC {}, {} positives"
        expected = [title.format(row["arm"], shown(row["auroc"]), row["positives"]) for row in detector["arms"]]
        assert sorted(cell.title for cell in cells) == sorted(expected)
        assert {heat.norm for heat in maps} == {"l1", "l2", "linf", None}
        for arm in large["arms"]:
            if arm["name"] in {row["arm"] for row in detector["arms"]} and arm["epsilon"] is not None:
                (heat,) = [heat for heat in maps if heat.norm == arm["norm"]]
                column = heat.columns.index(typed(arm["epsilon"]))
                titles = [row[column].title for _, row in heat.rows if row[column] is not None]
                assert sum(title.startswith(f"{arm['name']}: ") for title in titles) == 1


def test_cells_with_few_positives_have_no_colour(large):
    rough = {row["arm"] for row in large["detectors"][0]["arms"] if row["positives"] < 20}
    assert rough
    for heat in heat_maps(large, large["detectors"][0]):
        for cell in cells_of(heat):
            assert (cell.colour is None) == (cell.title.split(": AUROC")[0] in rough)


def test_arms_of_one_name_and_epsilon_keep_rows_of_their_own():
    result = small_result()
    first = next(arm for arm in result["arms"] if arm["epsilon"] == 5)
    twin = {**first, "name": "PGD-ACE", "group": "another"}
    detector = copy.deepcopy(result["detectors"][0])
    detector["arms"].append({**detector["arms"][0], "arm": "PGD-ACE"})
    (heat,) = [heat for heat in heat_maps({**result, "arms": [*result["arms"], twin]}, detector) if heat.norm == "l1"]
    assert {"PGD-ACE", "PGD-ACE (PGD-ACE)"} <= {name for name, _ in heat.rows}


def test_curves_are_those_of_the_lowest_group(small, small_page):
    nss = small["detectors"][0]
    (lowest,) = sorted((entry(nss, group) for group in ("linf 0.125", "linf 0.3125")), key=lambda row: row["auroc"])[:1]
    svg = plot(small_page, f"ROC curves of detector nss, group {lowest['group']}; AUROC: ")
    for objective, title in [("ace", "ACE"), ("gini", "Gini"), (None, "MEAD")]:
        assert f"{title} {shown(entry(nss, lowest['group'], objective=objective)['auroc'])}" in svg.get("aria-label")
    assert plot(small_page, "ROC curves of detector lid, group Spatial; AUROC: MEAD ") is not None
    assert len([one for one in svgs(small_page) if one.get("aria-label", "").startswith("ROC")]) == 6


def test_a_curve_goes_where_its_points_are():
    result = make(arms_of("Spatial"), ["nss"], samples=40)
    whole = result["detectors"][0]["results"][0]
    whole["curve"] = {"fpr": [0.0, 0.25, 1.0], "tpr": [0.0, 0.75, 1.0]}
    svg = plot(report_page(result), "ROC curves")
    paths = svg.iter("{http://www.w3.org/2000/svg}path")
    (path,) = [path.get("d") for path in paths if "stroke-width: 2.2" in path.get("style", "")]
    points = np.array([[float(x), float(y)] for x, y in re.findall(r"[ML] (\S+) (\S+)", path)])
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
    lengths = spans(svg, "#0072b2|#d98200|#009e73|#cc79a7")
    total = sum(lengths)
    assert [length / total for length in lengths] == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-3)
    assert "40.0 PGD-FR" in words(svg)


def test_arms_adaptive_to_the_detector_have_rows_of_their_own(small):
    lid = small["detectors"][1]
    (heat,) = [heat for heat in heat_maps(small, lid) if heat.norm == "linf"]
    name, row = heat.rows[-1]
    assert name == "PGD-ACE (white-box)"
    expected = [f"PGD-ACE {group}, knowing lid" for group in ("linf 0.125", "linf 0.3125")]
    assert [cell.title.split(":")[0] for cell in row] == expected
    assert not [name for name, _ in heat_maps(small, small["detectors"][0])[1].rows if "white-box" in name]


def test_groups_that_only_white_box_arms_have():
    result = small_result()
    lid = result["detectors"][1]
    lid["results"] = [row for row in lid["results"] if row["group"] != "linf 0.3125"]
    lid["white_box"] = [row for row in lid["white_box"] if (row["group"], row["scenario"]) != ("linf 0.3125", "all")]
    text = report_page(result)
    alone = entry(lid, "linf 0.3125", scenario="white-box")
    (row,) = Page(text).rows_of("linf 0.3125, white-box")
    assert row[2:4] == [str(alone["positives"]), shown(alone["coverage"])]
    assert {"no arms", shown(alone["auroc"])} <= set(words(plot(text, "Blind and white-box arms against detector lid")))
    lowest = min(alone["auroc"], entry(lid, "linf 0.125", scenario="all")["auroc"])
    assert Page(text).rows_of("lid")[0][7].startswith(shown(lowest))


def test_shared_runs_and_refused_arms():
    result = small_result()
    result["arms"][0] |= {"passes": {"forward": 1234.5, "backward": 0.0}}
    result["refused"] = [{"arms": ["PGD-ACE l1 5"], "detector": "lid", "reason": "It has no gradients."}] + [
        {"arms": [f"CW2 {number}"], "detector": None, "reason": "One class."} for number in range(5)
    ]
    page = Page(report_page(result))
    (row,) = [row for row in page.rows_of(result["arms"][0]["name"]) if row[0].startswith("robust_ext:")]
    assert row[-2:] == ["1,234", "0"]
    assert "Not run against lid: PGD-ACE l1 5. It has no gradients." in page.text
    assert "Not run: CW2 0, CW2 1, CW2 2 and 2 more. One class." in page.text
    assert "Not run against lid: PGD-ACE l1 5. It has no gradients." in report_text(result)


@pytest.mark.parametrize("name", ["x" * 4000, "long name " * 300, "攻撃 😀" * 200])
def test_long_names_do_not_break_the_page(name):
    renamed = [replace(arm, name=f"{name} {arm.name}") for arm in arms_of("l1 5")]
    text = report_page(make(renamed, [name], samples=40, rates={"l1 5": 0.9}))
    for svg in svgs(text):
        assert max(map(len, words(svg)), default=0) < 60
    assert name.strip() in " ".join(Page(text).text.split())


def test_without_positives():
    rates = {"l1 5": 0, "linf 0.125": 0, "Spatial": 0}
    text = report_page(make(arms_of(*rates), ["nss", "lid"], samples=30, white_box=["nss"], rates=rates))
    page = Page(text)
    assert "No attack succeeded often enough to judge a detector." in page.text
    assert set(page.data) == {0.0}, "the coverage is the only number left"
    assert not [svg for svg in svgs(text) if svg.get("aria-label", "").startswith(("ROC", "Attribution"))]
    assert "no AUROC" in words(plot(text, "Mean AUROC"))


def test_without_anything_optional():
    result = make(arms_of("Spatial"), ["nss"], samples=50)
    detector = result["detectors"][0]
    detector |= {"threshold": None, "threshold_fpr": None, "achieved_fpr": None}
    for row in detector["results"]:
        row.pop("curve", None)
        row["auroc_interval"] = None
    for row in detector["arms"]:
        row["slipped"] = None
    page = Page(report_page(result))
    assert "How much gets past the detector?" in page.text
    assert "Threshold" not in page.text
    assert page.row("Spatial", str(detector["arms"][0]["positives"]))[-2:] == ["-", "0"]


def test_numbers_of_the_public_code():
    arms = arms_of("linf 0.5")
    result = make(arms, ["nss"], samples=50, published=True)
    whole = entry(result["detectors"][0], "linf 0.5")
    (row,) = Page(report_page(result)).rows_of("linf 0.5")
    published = [shown(whole["published"][key]) for key in ("auroc", "fpr_at_95_tpr")]
    assert row[-2] == " and ".join(published)
    text = report_text(result)
    assert "published" in text
    assert " / ".join(published) in text
    without = make(arms, ["nss"], samples=50)
    assert "public code" not in Page(report_page(without)).text
    assert "published" not in report_text(without)


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
    lead = re.search(r'<p class="lead">(.*?)</p>', report_page(content), re.DOTALL).group(1)
    assert "4.8" in lead
