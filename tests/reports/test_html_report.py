"""The page of a result: what it says, and that it is safe, self-contained and repeatable."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.reports import Example, render_html

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL")

NASTY = "<script>alert(1)</script>\"'&$x_{1}$ \x00\x1b\ud800 攻撃 name-0 {{ seed }}"
CALIBRATION = {
    "chosen": {"kappa": 0.9999, "inner_points": 4999},
    "rows": [
        {"attack": "pgd", "kappa": kappa, "inner_points": inner, "score": 0.9, "random_score": 0.5, "samples": 64}
        for kappa, inner in [(0.99, 999), (0.999, 999), (0.9999, 999), (0.9999, 4999)]
    ],
}


class Page(HTMLParser):
    """Elements, attributes, visible text and the rows of all tables of a page."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.text, self.rows, self.data = [], [], "", [], []
        self._hidden, self._in_cell = 0, False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes.extend((tag, key, value) for key, value in attributes)
        self._hidden += tag == "style"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")
        if tag == "data":
            self.data.append(float(dict(attributes)["value"]))

    def handle_endtag(self, tag):
        self._hidden -= tag == "style"
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._hidden:
            return
        self.text += data
        if self._in_cell:
            self.rows[-1][-1] += data

    def row(self, *start):
        """The rest of the only row whose cells begin with ``start``."""
        rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        (found,) = [row[len(start) :] for row in rows if tuple(row[: len(start)]) == start]
        return found


def svgs(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]


def words(svg):
    return ["".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")]


def image(channels=1, size=4):
    return np.linspace(0, 1, channels * size * size).reshape(channels, size, size)


def example(**changes):
    clean = changes.pop("clean", image())
    settings = {"attack": "pgd", "sample": 3, "outcome": "found", "candidate": clean, "bounds": (0.0, 1.0)}
    return Example(clean=clean, **{**settings, **changes})


def test_numbers_are_those_of_the_result(make_attack, make_result):
    page = Page(render_html(make_result([make_attack("pgd", target="a resnet")], calibration=CALIBRATION)))
    assert page.data == [0.61328125, 0.12109375]
    score = ["0.613 [0.555, 0.669]", "0.121 [0.084, 0.167]"]
    assert page.row("pgd on a resnet", "failed") == [*score, "256", "9 of 37", "87.0"]
    assert page.row("pgd on a resnet", "157") == ["80", "11", "5", "2", "3", "7"]
    cost = ["3.25 s", "22.5 s", "18.8 s", "0.50 s", "87.0 s", "716,811", "10,249"]
    assert page.row("pgd on a resnet", "41.5 s") == cost
    assert page.row("pgd", "0.9999", "4999") == ["0.900", "0.500", "64", "chosen"]
    assert page.row("pgd", "0.9999", "999") == ["0.900", "0.500", "64", ""]
    for key, value in [("epsilon", repr(8 / 255)), ("corners", "yes"), ("seed", "20240501"), ("torch", "2.5.1")]:
        assert page.row(key) == [value]
    assert "Planted adversarial examples were missed." in page.text
    assert "157 of 256 planted problems were solved." in page.text


def test_columns_stand_under_their_headings(make_attack, make_result):
    page = Page(render_html(make_result([make_attack("pgd")])))
    assert page.row("Attack", "Found") == [
        "Not adversarial",
        "Beyond epsilon",
        "Out of bounds",
        "Not finite",
        "Not separable",
        "Not planted",
    ]
    phases = ["Readout", "Attack", "Random attack", "Verification", "Total", "Forward passes", "Backward passes"]
    assert page.row("Attack", "Features") == phases


@pytest.mark.parametrize("verdict", ["passed", "failed", "inconclusive"])
def test_the_verdict_is_said_in_words(make_attack, make_result, verdict):
    text = render_html(make_result([make_attack("pgd", verdict="passed")], verdict=verdict))
    assert re.search(rf"<h1>{verdict}</h1>", text)
    assert f"<title>Binarization test: {verdict}</title>" in text


def test_nothing_of_the_result_becomes_markup(make_attack, make_result):
    calibration = {**CALIBRATION, "rows": [{**row, "attack": NASTY} for row in CALIBRATION["rows"]]}
    result = make_result(
        [make_attack(NASTY, target=NASTY, reason=NASTY), make_attack("<img src=http://a.example/x.png>")],
        reason=NASTY,
        calibration=calibration,
        settings={"threshold": 0.95, NASTY: NASTY, "list": [NASTY, 1, None]},
        versions={NASTY: NASTY},
    )
    text = render_html(result, [example(attack=NASTY, outcome=NASTY)])
    page = Page(text)
    assert "script" not in page.elements
    assert page.elements.count("img") == 3
    assert text.count("&lt;script&gt;alert(1)") >= 12
    assert "\x00" not in text
    assert "\x1b" not in text
    assert "{{ seed }}" in page.text
    text.encode("utf-8")
    assert not [key for _, key, _ in page.attributes if key.startswith("on")]
    assert len(svgs(text)) > 3, "every plot is well-formed XML"


def test_names_stand_in_the_plots_as_they_are(make_attack, make_result):
    name = "$a_1$ <b> & name-1"
    plots = svgs(render_html(make_result([make_attack(name), make_attack("攻撃 😀")])))
    (scores,) = [words(svg) for svg in plots if "Test score and R-ASR of each" in svg.get("aria-label", "")]
    assert scores.count(name) == 1
    assert scores.count("攻撃 😀") == 1
    assert scores.count("0.613 score") == 2
    assert scores.count("0.121 R-ASR") == 2


def test_bars_are_as_long_as_the_scores(make_attack, make_result):
    attack = make_attack("pgd", score=0.8, random_score=0.2, score_interval=None, random_score_interval=None)
    plots = svgs(render_html(make_result([attack])))
    (svg,) = [svg for svg in plots if "Test score and R-ASR of each" in svg.get("aria-label", "")]
    lengths = []
    for path in svg.iter("{http://www.w3.org/2000/svg}path"):
        fill = re.search(r"fill: (#0072b2|url)", path.get("style", ""))
        if fill:
            across = [float(x) for x in re.findall(r"[ML] (\S+) ", path.get("d"))]
            lengths.append(max(across) - min(across))
    assert len(lengths) == 2
    assert lengths[0] / lengths[1] == pytest.approx(4)


def test_harder_settings_lie_to_the_right(make_attack, make_result):
    plots = svgs(render_html(make_result([make_attack("pgd")], calibration=CALIBRATION)))
    places = {}
    for svg in plots:
        for element in svg.iter("{http://www.w3.org/2000/svg}text"):
            places[svg.get("aria-label"), "".join(element.itertext())] = float(element.get("x") or "nan")
    kappa = "Test score and R-ASR against 1 - kappa (harder to the right)"
    inner = "Test score and R-ASR against inner points (harder to the right)"
    assert places[kappa, "0.01"] < places[kappa, "0.0001"]
    assert places[inner, "999"] < places[inner, "4999"]


def test_the_run_itself_is_marked_on_the_hardness_curve(make_attack, make_result):
    attack = make_attack("pgd")
    own = {"kappa": 0.9995, "score": attack["score"], "random_score": attack["random_score"]}
    for rows, marked in [([*attack["hardness"], own], True), (attack["hardness"], False)]:
        text = render_html(make_result([make_attack("pgd", hardness=rows)]))
        (svg,) = [svg for svg in svgs(text) if "against 1 - kappa" in svg.get("aria-label", "")]
        assert {"0.1", "0.01"} <= set(words(svg))
        assert ("0.0005" in words(svg)) == marked
        assert ("this run" in words(svg)) == marked


def test_a_calibration_without_a_choice(make_attack, make_result):
    page = Page(render_html(make_result([make_attack("pgd")], calibration={**CALIBRATION, "chosen": None})))
    assert "No setting was chosen." in page.text
    assert page.row("pgd", "0.9999", "4999") == ["0.900", "0.500", "64", ""]


def test_intervals_are_called_what_they_are(make_attack, make_result):
    assert "Thin lines: 95% intervals" in Page(render_html(make_result([make_attack("pgd")]))).text
    settings = {"threshold": 0.95, "confidence": 0.99}
    assert "Thin lines: 99% intervals" in Page(render_html(make_result([make_attack("pgd")], settings=settings))).text


def test_needs_nothing_from_outside(make_attack, make_result):
    text = render_html(make_result([make_attack("pgd")], calibration=CALIBRATION), [example()])
    page = Page(text)
    links = [value for _, key, value in page.attributes if key in ("src", "href", "xlink:href", "srcset", "action")]
    assert len(links) > 3
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.elements)
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    policy = [value for _, key, value in page.attributes if key == "content" and "default-src" in value]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_references_inside_the_page_lead_to_one_element(make_attack, make_result):
    attacks = [make_attack(name) for name in "abc"]
    text = render_html(make_result(attacks, calibration=CALIBRATION), [example()])
    page = Page(text)
    identifiers = [value for _, key, value in page.attributes if key == "id"]
    assert len(identifiers) == len(set(identifiers))
    targets = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    assert len(targets) > 3
    assert {first or second for first, second in targets} <= set(identifiers)


def test_same_input_same_text(make_attack, make_result):
    script = (
        "import hashlib, json, sys; from robust_ext.reports import render_html; "
        "print(hashlib.sha256(render_html(json.load(sys.stdin)).encode()).hexdigest())"
    )
    import hashlib
    import json

    result = make_result([make_attack("pgd"), make_attack("fgsm")], calibration=CALIBRATION)
    here = hashlib.sha256(render_html(result).encode()).hexdigest()
    again = hashlib.sha256(render_html(result).encode()).hexdigest()
    other = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(result), capture_output=True, text=True, check=True
    )
    assert here == again == other.stdout.strip()


def test_leaves_matplotlib_as_it_was(make_attack, make_result):
    import matplotlib

    with matplotlib.rc_context({"lines.linewidth": 9.0, "axes.labelsize": 31.0, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        styled = render_html(make_result([make_attack("pgd")]))
        assert dict(matplotlib.rcParams) == before
    assert styled == render_html(make_result([make_attack("pgd")])), "the page does not follow the reader's own style"


@pytest.mark.parametrize("count", [1, 8])
def test_one_and_many_attacks(make_attack, make_result, count):
    attacks = [make_attack(f"attack {number} " + "long " * 60) for number in range(count)]
    page = Page(render_html(make_result(attacks)))
    for number in range(count):
        name = " ".join(attacks[number]["name"].split())
        assert page.row(name, "failed")[0] == "0.613 [0.555, 0.669]"
    assert f"Binarization test of {count} attack{'' if count == 1 else 's'}" in page.text


def test_without_scores(make_attack, make_result):
    nothing = dict.fromkeys(("score", "score_interval", "random_score", "random_score_interval"))
    seconds = dict.fromkeys(("features", "readout", "attack", "random", "verify", "total"), 0.0)
    attack = make_attack("pgd", **nothing, hardness=[], verdict="inconclusive", samples=0, seconds=seconds)
    text = render_html(make_result([attack], verdict="inconclusive"))
    page = Page(text)
    assert page.data == []
    assert page.row("pgd", "inconclusive")[:3] == ["-", "-", "0"]
    assert {"no score", "no R-ASR"} <= {word for svg in svgs(text) for word in words(svg)}
    assert "How hard was the test?" not in page.text


@pytest.mark.parametrize("kappa", [0.0, 0.9, 0.999, 1 - 1e-9])
def test_a_curve_of_one_point(make_attack, make_result, kappa):
    point = {"score": 0.5, "random_score": 0.1}
    attack = make_attack("pgd", **point, hardness=[{"kappa": kappa, **point}])
    (svg,) = [svg for svg in svgs(render_html(make_result([attack]))) if "1 - kappa" in svg.get("aria-label", "")]
    assert f"{1 - kappa:.4g}" in words(svg)
    assert "this run" in words(svg)


def test_missing_scores_leave_gaps_in_curves(make_attack, make_result):
    hardness = [{"kappa": 0.9, "score": None, "random_score": None}, {"kappa": 1.0, "score": 0.1, "random_score": 0.1}]
    text = render_html(make_result([make_attack("pgd", score=None, hardness=hardness)]))
    assert [svg for svg in svgs(text) if "against 1 - kappa" in svg.get("aria-label", "")]


def test_refuses_a_result_without_attacks(make_result):
    with pytest.raises(InvalidArgumentError, match="at least one attack"):
        render_html(make_result([]))


def test_inputs_that_are_no_images_are_counted(make_attack, make_result):
    vector = example(clean=np.zeros(5))
    result = make_result([make_attack("pgd")])
    page = Page(render_html(result, [vector]))
    assert "1 example is not shown, because the inputs are not images" in page.text
    assert "img" not in page.elements
    page = Page(render_html(result, [vector, example(), vector]))
    assert "2 examples are not shown" in page.text
    assert page.elements.count("img") == 3
    assert "not shown" not in Page(render_html(result, [example()])).text


def test_captions_say_the_outcome_and_the_scale(make_attack, make_result):
    clean = image()
    moved = example(clean=clean, candidate=clean - 0.125, outcome="beyond_epsilon", sample=17)
    page = Page(render_html(make_result([make_attack("pgd")]), [moved, example()]))
    text = " ".join(page.text.split())
    assert "Sample 17: beyond epsilon. Scale ±0.125; values beyond the bounds are cut." in text
    assert "Sample 3: found. No change." in text


@pytest.mark.parametrize(("module", "named"), [("jinja2", "jinja2"), ("matplotlib.figure", "matplotlib")])
def test_says_how_to_install_what_is_missing(make_attack, make_result, monkeypatch, module, named):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"{named}: pip install \"robust-ext\[cli\]\""):
        render_html(make_result([make_attack("pgd")]))


def test_import_and_pages_touch_no_more_than_they_need(make_attack, make_result):
    import json

    script = (
        "import json, sys; import robust_ext.reports as reports; "
        "early = {'matplotlib', 'jinja2', 'PIL'} & set(sys.modules); assert not early, early; "
        "reports.render_html(json.load(sys.stdin)); "
        "assert 'matplotlib.figure' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    text = json.dumps(make_result([make_attack("pgd")]))
    done = subprocess.run([sys.executable, "-c", script], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
