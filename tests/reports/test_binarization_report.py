"""The page of a binarization test: bars, curves and marks stand where the numbers put them."""

import re

import pytest

from robust_ext.reports import report_page
from robust_ext.reports.binarization import depth_words
from tests.reports.pages import Page, plot, spans, svgs, words
from tests.reports.results import CALIBRATION, depth_row, make_attack, make_result

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


def test_names_stand_in_the_plots_as_they_are():
    name = "$a_1$ <b> & name-1"
    plots = svgs(report_page(make_result([make_attack(name), make_attack("攻撃 😀")])))
    (scores,) = [words(svg) for svg in plots if "Test score and R-ASR of each" in svg.get("aria-label", "")]
    expected = {name: 1, "攻撃 😀": 1, "0.613 score": 2, "0.121 R-ASR": 2}
    assert {word: scores.count(word) for word in expected} == expected


def test_bars_are_as_long_as_the_scores():
    attack = make_attack("pgd", score=0.8, random_score=0.2, score_interval=None, random_score_interval=None)
    lengths = spans(plot(report_page(make_result([attack])), "Test score and R-ASR of each"), "#0072b2|url")
    assert len(lengths) == 2
    assert lengths[0] / lengths[1] == pytest.approx(4)


def test_harder_settings_lie_to_the_right():
    plots = svgs(report_page(make_result([make_attack("pgd")], calibration=CALIBRATION)))
    places = {}
    for svg in plots:
        for element in svg.iter("{http://www.w3.org/2000/svg}text"):
            places[svg.get("aria-label"), "".join(element.itertext())] = float(element.get("x") or "nan")
    for axis, easy, hard in (("1 - kappa", "0.01", "0.0001"), ("inner points", "999", "4999")):
        label = f"Test score and R-ASR against {axis} (harder to the right)"
        assert places[label, easy] < places[label, hard]


def test_deeper_rows_of_a_calibration_are_a_curve_of_their_own():
    first = CALIBRATION["rows"][0]
    rows = [{**first, "depth": depth, "score": score} for depth, score in ((1.0, 1.0), (2.0, 0.97), (4.0, 0.5))]
    chosen = {"kappa": first["kappa"], "inner_points": first["inner_points"], "depth": 2.0}
    text = report_page(
        make_result([make_attack("pgd")], calibration={"chosen": chosen, "reason": "Why.", "rows": rows})
    )
    labels = [svg.get("aria-label", "") for svg in svgs(text)]
    assert "Test score and R-ASR against depth (harder to the right)" in labels
    assert not any("against inner points" in label for label in labels)
    assert (
        f"Chosen: kappa {chosen['kappa']} with {chosen['inner_points']} inner points at depth 2. Why."
        in Page(text).text
    )
    found = Page(text).row("pgd", str(first["kappa"]), str(first["inner_points"]), "0.05", "1", "2")
    assert found == ["0.970", "0.500", "64", "chosen"]


def test_the_run_itself_is_marked_on_the_hardness_curve():
    attack = make_attack("pgd")
    own = {"kappa": 0.9995, "score": attack["score"], "random_score": attack["random_score"]}
    for rows, marked in [([*attack["hardness"], own], True), (attack["hardness"], False)]:
        text = report_page(make_result([make_attack("pgd", hardness=rows)]))
        (svg,) = [svg for svg in svgs(text) if "against 1 - kappa" in svg.get("aria-label", "")]
        assert {"0.1", "0.01"} <= set(words(svg))
        assert ("0.0005" in words(svg)) == marked
        assert ("this run" in words(svg)) == marked


def test_a_calibration_without_a_choice():
    page = Page(report_page(make_result([make_attack("pgd")], calibration={**CALIBRATION, "chosen": None})))
    assert "No setting was chosen." in page.text
    assert page.row("pgd", "0.9999", "4999") == ["0.05", "1", "1", "0.900", "0.500", "64", ""]


def test_intervals_are_called_what_they_are():
    for settings, per_cent in (({}, 95), ({"confidence": 0.99}, 99)):
        result = make_result([make_attack("pgd")], settings={"threshold": 0.95, **settings})
        assert f"Thin lines: {per_cent}% intervals" in Page(report_page(result)).text


@pytest.mark.parametrize("count", [1, 8])
def test_one_and_many_attacks(count):
    attacks = [make_attack(f"attack {number} " + "long " * 60) for number in range(count)]
    page = Page(report_page(make_result(attacks)))
    for number in range(count):
        name = " ".join(attacks[number]["name"].split())
        assert page.row(name, "failed")[0] == "0.613 [0.55, 0.67]"
    assert f"Binarization test of {count} attack{'' if count == 1 else 's'}" in page.text


def test_without_scores():
    nothing = dict.fromkeys(("score", "score_interval", "random_score", "random_score_interval"))
    seconds = dict.fromkeys(("features", "readout", "attack", "random", "verify", "total"), 0.0)
    attack = make_attack("pgd", **nothing, hardness=[], depths=[], verdict="inconclusive", samples=0, seconds=seconds)
    text = report_page(make_result([attack], verdict="inconclusive"))
    page = Page(text)
    assert page.row("pgd", "inconclusive")[:3] == ["-", "-", "-"]
    assert {"no score", "no R-ASR"} <= {word for svg in svgs(text) for word in words(svg)}
    assert "How hard was the test?" not in page.text


@pytest.mark.parametrize("kappa", [0.0, 0.9, 0.999, 1 - 1e-9])
def test_a_curve_of_one_point(kappa):
    point = {"score": 0.5, "random_score": 0.1}
    attack = make_attack("pgd", **point, hardness=[{"kappa": kappa, **point}])
    (svg,) = [svg for svg in svgs(report_page(make_result([attack]))) if "1 - kappa" in svg.get("aria-label", "")]
    assert f"{1 - kappa:.4g}" in words(svg)
    assert "this run" in words(svg)


def test_missing_scores_leave_gaps_in_curves():
    hardness = [{"kappa": 0.9, "score": None, "random_score": None}, {"kappa": 1.0, "score": 0.1, "random_score": 0.1}]
    text = report_page(make_result([make_attack("pgd", score=None, hardness=hardness)]))
    assert [svg for svg in svgs(text) if "against 1 - kappa" in svg.get("aria-label", "")]


def test_depths_of_attacks_beside_what_is_proved():
    """Shares of all samples; where nothing was posed to an attack it solved nothing."""
    strong = [depth_row(depth, n, n, 0, (n, n, 0)) for depth, n in ((1.0, 256), (2.0, 192), (4.0, 64))]
    attacks = [make_attack("strong", depth=4.0, depths=strong), make_attack("weak"), make_attack("off", depths=[])]
    text = report_page(make_result(attacks))
    shown = words(plot(text, "Share of planted samples solved"))
    assert {"proved by witnesses", "strong", "weak", "1", "2", "4"} <= set(shown)
    assert "off" not in shown
    page = Page(text)
    assert [page.row(name, "failed")[2] for name in ("strong", "weak", "off")] == ["4+", "-", "-"]
    assert page.row("weak", "2") == ["192", "48", "0.250 [0.15, 0.35]", "0.021", "160", "40"]
    assert depth_words(make_attack("part", depth=2.0, depths=strong)) == "2"
    none = report_page(make_result([make_attack("off", depths=[])]))
    assert not [svg for svg in svgs(none) if "against the depth" in svg.get("aria-label", "")]


@pytest.mark.parametrize(
    "verdicts", [("passed",), ("passed", "failed"), ("passed", "failed", "failed", "inconclusive")]
)
def test_the_headline_counts_the_attacks_that_pass(verdicts):
    attacks = [make_attack(f"attack {number}", verdict=verdict) for number, verdict in enumerate(verdicts)]
    (headline,) = re.findall(r"<h1>(.*?)</h1>", report_page(make_result(attacks, verdict="passed")))
    assert (f"1 of {len(verdicts)}" in headline) == (len(verdicts) > 1)
