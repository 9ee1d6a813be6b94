"""The pages and badges of all kinds of results: what they show, that they are safe, readable, repeatable and sort."""

import base64
import hashlib
import html
import json
import os
import re
import shlex
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import numpy as np
import pytest

from robust_ext import reports
from robust_ext.core.errors import DataError
from robust_ext.core.finding_texts import leading
from robust_ext.engine.context import RunContext, run_context
from robust_ext.reports import badge, report_page, report_text, save
from robust_ext.reports.plots import COLOURS, DARK, INK, MUTED
from tests.reports import results as made
from tests.reports.pages import NASTY, SVG, Page, outline, svgs
from tests.reports.results import FINDINGS, arms_of, make_attack, make_example, make_mead, make_result

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL")

SNAPSHOTS = Path(__file__).parent / "snapshots"
SCRIPT, STYLE = (Path(reports.__file__).with_name(name).read_text(encoding="utf-8") for name in ("sort.js", "page.css"))
WHOLE = {"calibration": made.CALIBRATION, "findings": FINDINGS}
# A group of few positives, scores that are no numbers, and a combination of detectors.
ARMS, OF_MEAD = arms_of("l1 5", "linf 0.125", "Spatial"), {"white_box": ["lid"], "rates": {"l1 5": 0.05}}
OF_MEAD |= {"unscored": 3, "combines": {"mean(nss, lid)": ["nss", "lid"]}}
KINDS = {
    "binarization": lambda name: make_result([make_attack(name, target="a resnet")], **WHOLE),
    "pair": lambda name: make_result([made.make_pair(name)], verdict="inconclusive"),
    "mead": lambda name: make_mead(ARMS, [name, "mean(nss, lid)", "lid"], samples=60, **OF_MEAD),
    "robust_accuracy": lambda name: made.make_robust_accuracy(name, "ddn", findings=FINDINGS),
    "adaptive": lambda name: made.make_adaptive(name, "Square"),
    "diagnosis": lambda name: made.make_diagnosis(name, "ddn"),
    "evaluation": lambda name: made.make_evaluation(name, "ddn"),
    "case_studies": made.make_case_studies,
    "reproduction": made.make_reproduction,
}
FREE = "name target reason attack description suite defense category arm group detector cause evidence layer words"
FREE = {*FREE.split(), "code", "title", "source", "notes"}
EXAMPLES = {"binarization": [make_example(planted=np.full((1, 4, 4), 0.75))], "mead": [make_example()]}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def page(kind):
    return report_page(KINDS[kind]("pgd"), EXAMPLES.get(kind, ()))


def test_text_page_and_badge_are_as_they_were(kind, page):
    """Run with ROBUST_EXT_UPDATE_SNAPSHOTS=1 to write what is shown now; read the difference before it is kept."""
    title = ElementTree.fromstring(badge(KINDS[kind]("pgd"))).get("aria-label")
    shown = f"{report_text(KINDS[kind]('pgd'))}\n{'=' * 20}\n{outline(page)}{'=' * 20}\nbadge: {title}\n"
    file = SNAPSHOTS / f"{kind}.txt"
    if os.environ.get("ROBUST_EXT_UPDATE_SNAPSHOTS"):
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8")


GIVEN = {NASTY: NASTY, "list": [NASTY, 1, None]}


def renamed(value, key=""):
    if key in ("settings", "versions"):
        return {"threshold": 0.95, "budget": NASTY, "robust_ext": NASTY, **GIVEN}
    if isinstance(value, dict):
        return {name: renamed(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [NASTY if isinstance(one, str) else renamed(one) for one in value]
    return NASTY if key in FREE and isinstance(value, str) else value


def test_nothing_of_the_result_becomes_markup(kind):
    result = KINDS[kind](NASTY) if kind == "mead" else renamed(KINDS[kind](NASTY))
    if kind == "mead":
        result |= {"suite": NASTY, "settings": GIVEN, "versions": {NASTY: NASTY}}
        for arm in result["arms"]:
            arm["attack"] = NASTY
            arm["outcomes"][NASTY] = 1
        for row in result["averages"]:
            row["objective"] = NASTY if row["objective"] == "kl" else row["objective"]
    if kind == "adaptive":
        for part in ("static", "defended"):
            result[part]["worst_case"]["by"] = {"clean": 1, NASTY: 2}
    text = report_page(result, [make_example(attack=NASTY, outcome=NASTY)] if kind in EXAMPLES else ())
    page = Page(text)
    assert page.elements.count("script") == 1
    assert re.search("<script>(.*?)</script>", text, flags=re.DOTALL)[1] == SCRIPT
    assert page.elements.count("img") == len(svgs(text)) + (3 if kind in EXAMPLES else 0)
    assert text.count("&lt;script&gt;alert(1)") >= 6
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", text)
    assert "{{ seed }}" in page.text
    text.encode("utf-8")
    assert not [key for _, key, _ in page.attributes if key.startswith("on")]
    assert svgs(text), "every plot is well-formed XML"
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\ud800-\udfff]", report_text(result))


def test_needs_nothing_from_outside(kind, page):
    parsed = Page(page)
    links = [value for _, key, value in parsed.attributes if key in ("src", "href", "xlink:href", "srcset", "action")]
    assert all(link.startswith(("data:image/png;base64,", "data:image/svg+xml;base64,", "#")) for link in links)
    assert not {"link", "iframe", "object", "embed", "base"} & set(parsed.elements)
    assert "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []
    assert "http://" not in page.replace("http://www.w3.org", "")
    policy = [value for _, key, value in parsed.attributes if key == "content" and "default-src" in value]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # The page's own script is the only one that runs.
    assert policy == [f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"]


def test_structure(kind, page):
    """Tags are closed, rows of a table equally long, headings go down one step at a time, links lead to one element."""
    stack = []
    for closing, tag, alone in re.findall(r"<(/?)([a-zA-Z][\w:-]*)(?:\"[^\"]*\"|[^>\"])*?(/?)>", page):
        if closing:
            assert stack.pop() == tag
        elif not alone and tag not in {"meta", "img", "br", "hr", "col"}:
            stack.append(tag)
    assert stack == []
    for table in re.findall(r"<table.*?</table>", page, flags=re.DOTALL):
        rows = re.findall(r"<tr.*?</tr>", table, flags=re.DOTALL)
        assert len({len(re.findall(r"<t[dh][ >]", row)) for row in rows}) == 1
    levels = [int(level) for level in re.findall(r"<h([1-4])\b", page)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    identifiers = [value for _, key, value in Page(page).attributes if key == "id"]
    targets = set(re.findall(r'href="#([^"]+)"', page))
    assert len(identifiers) == len(set(identifiers))
    assert targets <= set(identifiers)
    assert bool(targets) == (kind == "mead")
    assert all(len(svg.get("aria-label")) >= 10 for svg in svgs(page)), "named for those who cannot see them"
    # The first screen answers, and names the way to repeat the run; what is open stands before what is folded.
    terms = re.findall(r"<dt>(.*?)</dt>", page[: page.index("</section>")])
    assert terms[-1] == "Repeat"
    assert ("Remedy" in terms) == bool(leading(KINDS[kind]("pgd").get("findings", ())))
    assert page[: page.index("<details")].count("<section") == page.count("<section") <= 3


LIGHT, NIGHT = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", part))
    for part in re.findall(r":root \{(.*?)\n *\}", STYLE, flags=re.DOTALL)
)


def channels(colour):
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


def luminance(colour):
    shares = [value / 255 for value in channels(colour)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """As WCAG 2 defines it; 4.5 is readable (AA) for text, 3 for shapes."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_plots_are_readable_in_the_light_and_in_the_dark():
    verdicts = ("passed", "failed", "inconclusive")
    washes = ["paper", "wash", *(f"{verdict}-wash" for verdict in verdicts)]
    own = {verdict: ["paper", f"{verdict}-wash"] for verdict in verdicts}
    for scheme in (LIGHT, NIGHT):
        for ink, papers in {"ink": washes, "muted": washes, "link": ["paper"], **own}.items():
            assert all(contrast(scheme[ink], scheme[paper]) >= 4.5 for paper in papers), ink
        for end in ("low", "high"):
            for weight in (part / 10 for part in range(11)):
                pairs = zip(channels(scheme[end]), channels(scheme["middle"]), strict=True)
                mixed = "#" + "".join(f"{round(weight * a + (1 - weight) * b):02x}" for a, b in pairs)
                assert contrast(scheme["ink"], mixed) >= 4.5, (end, weight)
    paper = DARK["#ffffff"]
    assert paper == NIGHT["paper"]
    assert luminance(paper) < 0.02
    assert all(contrast(DARK[text], paper) >= 4.5 for text in (INK, MUTED))
    assert all(contrast(DARK[colour], paper) >= 3 for colour in COLOURS)


def test_pages_in_the_dark_and_on_narrow_screens(page):
    """Plots have no colour that stays as it is in the dark; wide tables scroll or turn their rows into blocks."""
    for image in re.findall(r"data:image/svg\+xml;base64,([^\"]*)", page):
        style, rest = base64.b64decode(image).decode().split("</style>", 1)
        colours = re.findall(r"#([0-9a-f]{6})\b", rest)
        assert sorted(colours) == sorted(re.findall(r"var\(--c(?=([0-9a-f]{6}), #\1\b)", rest))
        assert all(f"--c{colour}: {DARK[f'#{colour}']};" in style for colour in {*colours})
    for before, table in pairwise(page.split("<table")):
        attributes, content = table.split("</table>")[0].split(">", 1)
        line = before.removesuffix("\n").rpartition("\n")[2]
        assert 'class="pairs"' in attributes or 'class="scroll" tabindex="0" role="region" aria-label="' in line
        assert "stack" not in attributes or '<td class="number">' not in content, "a number without its column's title"


def test_the_command_that_repeats_a_run_stands_on_its_page():
    """Its judge's seed too; not the folder, where it would find the finished run."""
    result = KINDS["diagnosis"]("pgd")
    result["settings"] |= {"judge_seed": 7}
    kept = ["--model=m", "--attack=a:B(x='1')", f"--data={'d' * 90}"]
    with run_context(RunContext(command=("diagnose", *kept[:2], "--no-progress", "--out=run", kept[2]))):
        text = html.unescape(report_page(result))
    shown = re.findall(r"<pre[^>]*><code>(robust-ext diagnose .*?)</code>", text, flags=re.DOTALL)[-1]
    assert shlex.split(shown.replace("\\\n", " ")) == ["robust-ext", "diagnose", "--judge-seed=7", *kept]


def test_files_of_a_result(tmp_path, monkeypatch):
    """A failed write keeps the old ones; numbers that JSON does not know are refused."""
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            save(make_result([make_attack("pgd", score=value)]), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    result, folder = make_result([make_attack("攻撃 \ud800")]), tmp_path / "deep" / "run"
    save({**result, "seed": 2}, str(folder))
    save(result, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    files = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert json.loads(files.pop("result.json")) == {"format": 2, **result}
    assert files == {"report.html": report_page(result), "badge.svg": badge(result)}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError("no space left on device")))
    with pytest.raises(DataError, match="no space"):
        save({**result, "seed": 3}, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["pgd", NASTY])
def test_a_badge_is_readable_and_nothing_of_a_name_becomes_markup_in_it(kind, name):
    text = badge(KINDS[kind](name) | ({"norm": name} if kind == "robust_accuracy" else {}))
    text.encode("utf-8")
    root = ElementTree.fromstring(text)
    texts = list(root.iter(f"{SVG}text"))
    assert root.find(f"{SVG}title").text == root.get("aria-label")
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "title", "rect", "path", "g", "text"}
    assert "href" not in text
    assert ("&lt;script&gt;" in text) == (name == NASTY and kind == "robust_accuracy")
    whole, left = root.find(f"{SVG}rect"), root.find(f"{SVG}path")
    assert all(contrast("#ffffff", half.get("fill")) >= 4.5 for half in (left, whole))
    middle = int(left.get("d").split("H")[1].split("V")[0])
    for begin, end, words in zip((0, middle), (middle, int(whole.get("width"))), texts, strict=True):
        start, length = int(words.get("x")), int(words.get("textLength"))
        assert begin + 6 <= start <= end - 6 - length
        assert 4 <= length / len(words.text) <= 9
        assert len(words.text) <= 40


def of_mead(name):
    """A result of two detectors, and what its badge says of the higher one of their lowest AUROCs."""
    result = make_mead(arms_of("l1 5", "linf 0.125"), [name, "lid"], samples=60, white_box=["lid"])
    lowest = [
        min(row["auroc"] for row in (*one["results"], *one["white_box"]) if not (row["objective"] or row["algorithm"]))
        for one in result["detectors"]
    ]
    best = max(lowest)
    return result, f"worst-case AUROC, {(name, 'lid')[lowest.index(best)]}", f"{made.shown(best)}%"


def test_nothing_of_a_name_becomes_markup_in_a_badge_and_nothing_is_loaded():
    for result in (made.make_robust_accuracy("pgd", norm=NASTY), of_mead(NASTY)[0]):
        text = badge(result)
        text.encode("utf-8")
        root = ElementTree.fromstring(text)
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert tags == {"svg", "title", "rect", "path", "g", "text"}
        assert "href" not in text
        assert all(len(element.text) <= 40 for element in root.iter(f"{SVG}text"))
        assert "&lt;script&gt;" in text
