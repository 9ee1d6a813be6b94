"""The page of a binarization test: bars, curves and marks stand where the numbers put them."""

import re

import pytest

from robust_ext.reports import report_page
from tests.reports.pages import Page, plot, spans, svgs, words
from tests.reports.results import CALIBRATION, depth_row, make_attack, make_result

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


SVG = "{http://www.w3.org/2000/svg}"


def hardness(text):
    return [svg for svg in svgs(text) if "against 1 - kappa" in svg.get("aria-label", "")]


def test_bars_are_as_long_as_the_scores_under_names_as_they_are():
    name = "$a_1$ <b> & name-1"
    attack = make_attack(name, score=0.8, random_score=0.2, score_interval=None, random_score_interval=None)
    svg = plot(report_page(make_result([attack])), "Test score and R-ASR of each")
    assert {name, "0.800 score", "0.200 R-ASR"} <= set(words(svg))
    lengths = spans(svg, "#0072b2|url")
    assert lengths[0] / lengths[1] == pytest.approx(4)


def test_the_chosen_row_of_a_calibration_is_named():
    first = CALIBRATION["rows"][0]
    rows = [{**first, "depth": depth, "score": score} for depth, score in ((1.0, 1.0), (2.0, 0.97), (4.0, 0.5))]
    chosen = {"kappa": first["kappa"], "inner_points": first["inner_points"], "depth": 2.0}
    for choice, last in ((chosen, "chosen"), (None, "")):
        calibration = {"chosen": choice, "reason": "Why.", "rows": rows}
        page = Page(report_page(make_result([make_attack("pgd")], calibration=calibration)))
        found = page.row("pgd", str(first["kappa"]), str(first["inner_points"]), "0.05", "1", "2")
        assert found == ["0.970", "0.500", "64", last]


def test_the_run_itself_is_marked_on_the_hardness_curve():
    attack = make_attack("pgd")
    own = {"kappa": 0.9995, "score": attack["score"], "random_score": attack["random_score"]}
    gap = {"kappa": 0.5, "score": None, "random_score": None}
    for rows, marked in [([*attack["hardness"], own], True), ([*attack["hardness"], gap], False), ([own], True)]:
        (svg,) = hardness(report_page(make_result([make_attack("pgd", hardness=rows)])))
        assert (("0.0005" in words(svg)), ("this run" in words(svg))) == (marked, marked)
        places = {"".join(one.itertext()): float(one.get("x") or "nan") for one in svg.iter(f"{SVG}text")}
        assert len(rows) == 1 or places["0.1"] < places["0.01"], "harder settings lie to the right"


def test_without_scores():
    nothing = dict.fromkeys(("score", "score_interval", "random_score", "random_score_interval"))
    seconds = dict.fromkeys(("features", "readout", "attack", "random", "verify", "total"), 0.0)
    attack = make_attack("pgd", **nothing, hardness=[], depths=[], verdict="inconclusive", samples=0, seconds=seconds)
    text = report_page(make_result([attack], verdict="inconclusive"))
    assert Page(text).row("pgd", "inconclusive")[:3] == ["-", "-", "-"]
    assert {"no score", "no R-ASR"} <= {word for svg in svgs(text) for word in words(svg)}
    assert not hardness(text)


def test_depths_of_attacks_beside_what_is_proved():
    """Shares of all samples; where nothing was posed to an attack it solved nothing."""
    strong = [depth_row(depth, n, n, 0, (n, n, 0)) for depth, n in ((1.0, 256), (2.0, 192), (4.0, 64))]
    attacks = [make_attack("strong", depth=4.0, depths=strong), make_attack("part", depth=2.0, depths=strong)]
    attacks += [make_attack("weak"), make_attack("off", depths=[])]
    text = report_page(make_result(attacks))
    shown = words(plot(text, "Share of planted samples solved"))
    assert {"proved by witnesses", "strong", "weak", "1", "2", "4"} <= set(shown)
    assert "off" not in shown
    page = Page(text)
    assert [page.row(one["name"], "failed")[2] for one in attacks] == ["4+", "2", "-", "-"]
    assert page.row("weak", "2") == ["192", "48", "0.250 [0.15, 0.35]", "0.021", "160", "40"]


@pytest.mark.parametrize(
    ("verdicts", "look"),
    [
        ("passed", "passed"),
        ("passed passed", "passed"),
        ("passed failed", "mixed"),
        ("passed failed failed inconclusive", "mixed"),
        ("failed failed", "failed"),
        ("inconclusive failed", "inconclusive"),
    ],
)
def test_no_page_with_failures_is_headed_by_a_green_pass(verdicts, look):
    attacks = [make_attack(f"attack {number}", verdict=one) for number, one in enumerate(verdicts.split())]
    text = report_page(make_result(attacks, verdict=look.replace("mixed", "passed")))
    assert re.search(r'<section class="verdict (\w+)">', text)[1] == look
    counts = [str(number) for number in (verdicts.count("passed"), len(attacks))] if look == "mixed" else []
    assert re.findall(r"\d", re.search(r"<h1>(.*?)</h1>", text)[1])[:2] == counts
