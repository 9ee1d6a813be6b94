"""The pages of all kinds of results: what they show, and that they are safe, self-contained and repeatable."""

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

import numpy as np
import pytest

from robust_ext import reports
from robust_ext.core import finding_texts as findings
from robust_ext.core.errors import DataError
from robust_ext.engine.context import RunContext, run_context
from robust_ext.reports import report_page, report_text, save
from tests.reports.mead_results import arms_of, make
from tests.reports.pages import NASTY, Page, outline, svgs
from tests.reports.results import (
    CALIBRATION,
    FINDINGS,
    make_adaptive,
    make_attack,
    make_case_studies,
    make_diagnosis,
    make_evaluation,
    make_example,
    make_pair,
    make_reproduction,
    make_result,
    make_robust_accuracy,
)

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL")

SNAPSHOTS = Path(__file__).parent / "snapshots"
SCRIPT = (Path(reports.__file__).parent / "sort.js").read_text(encoding="utf-8")
UPDATE = "ROBUST_EXT_UPDATE_SNAPSHOTS"
KINDS = {
    "binarization": lambda name: make_result(
        [make_attack(name, target="a resnet")], calibration=CALIBRATION, findings=FINDINGS
    ),
    "pair": lambda name: make_result([make_pair(name)], verdict="inconclusive"),
    "mead": lambda name: make(arms_of("linf 0.125", "Spatial"), [name, "lid"], samples=60, white_box=["lid"]),
    "robust_accuracy": lambda name: make_robust_accuracy(name, "ddn", findings=FINDINGS),
    "adaptive": lambda name: make_adaptive(name, "Square"),
    "diagnosis": lambda name: make_diagnosis(name, "ddn"),
    "evaluation": lambda name: make_evaluation(name, "ddn"),
    "case_studies": make_case_studies,
    "reproduction": make_reproduction,
}
FREE = re.compile(
    "name|target|reason|attack|description|suite|defense|category|arm|group|detector|cause|evidence|layer|words|code|title|source|notes"
)
PLANTED = make_example(planted=np.full((1, 4, 4), 0.75))
EXAMPLES = {"binarization": [PLANTED], "mead": [make_example()]}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def page(kind):
    return report_page(KINDS[kind]("pgd"), EXAMPLES.get(kind, ()))


def renamed(value):
    """A result in which every text that a user chooses is nasty."""
    if isinstance(value, dict):
        given = {NASTY: NASTY, "list": [NASTY, 1, None]}
        return {
            key: {"threshold": 0.95, "budget": NASTY, **given}
            if key == "settings"
            else {"robust_ext": NASTY, **given}
            if key == "versions"
            else NASTY
            if FREE.fullmatch(key) and isinstance(one, str)
            else renamed(one)
            for key, one in value.items()
        }
    return [NASTY if isinstance(one, str) else renamed(one) for one in value] if isinstance(value, list) else value


def test_text_and_page_are_as_they_were(kind, page):
    """Run with ROBUST_EXT_UPDATE_SNAPSHOTS=1 to write what is shown now; read the difference before it is kept."""
    shown = f"{report_text(KINDS[kind]('pgd'))}\n{'=' * 20}\n{outline(page)}"
    file = SNAPSHOTS / f"{kind}.txt"
    if os.environ.get(UPDATE):
        SNAPSHOTS.mkdir(exist_ok=True)
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8")


def test_nothing_of_the_result_becomes_markup(kind):
    result = KINDS[kind](NASTY) if kind == "mead" else renamed(KINDS[kind](NASTY))
    if kind == "mead":
        result |= {"suite": NASTY, "settings": {NASTY: NASTY, "list": [NASTY, 1, None]}, "versions": {NASTY: NASTY}}
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
    assert kind not in EXAMPLES or len(links) > 3
    assert all(link.startswith(("data:image/png;base64,", "data:image/svg+xml;base64,", "#")) for link in links)
    assert not {"link", "iframe", "object", "embed", "base"} & set(parsed.elements)
    assert "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []
    assert "http://" not in page.replace("http://www.w3.org", "")
    policy = [value for _, key, value in parsed.attributes if key == "content" and "default-src" in value]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert policy == [f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"], (
        "the page's own script is the only one that runs"
    )


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
    labels = [svg.get("aria-label") for svg in svgs(page)]
    assert labels
    assert all(len(label) >= 10 for label in labels), "plots are named for those who cannot see them"


def test_the_first_screen_answers_and_the_rest_is_folded(kind, page):
    first = page[: page.index("</section>")]
    terms = re.findall(r"<dt>(.*?)</dt>", first)
    assert terms[-1] == "Repeat", "the way to repeat the run is on every page"
    found = findings.leading(KINDS[kind]("pgd").get("findings", ()))
    assert ("Remedy" in terms) == bool(found)
    shown = page[: page.index("<details")].count("<section")
    assert shown <= 3
    assert page.count("<section") == shown, "what is open stands before what is folded"


def test_the_command_that_repeats_a_run_stands_on_its_page():
    """Its judge's seed too; not the folder, where it would find the finished run."""
    result = KINDS["diagnosis"]("pgd")
    result["settings"] |= {"judge_seed": 7}
    command = ("diagnose", "--model=m", "--attack=a:B(x='1')", "--no-progress", "--out=run", f"--data={'d' * 90}")
    with run_context(RunContext(command=command)):
        text = html.unescape(report_page(result))
    shown = re.findall(r"<pre[^>]*><code>(robust-ext diagnose .*?)</code>", text, flags=re.DOTALL)[-1]
    assert shlex.split(shown.replace("\\\n", " ")) == [
        *("robust-ext", "diagnose", "--judge-seed=7", "--model=m", "--attack=a:B(x='1')"),
        f"--data={'d' * 90}",
    ]


def test_leaves_matplotlib_as_it_was():
    import matplotlib

    result = make_result([make_attack("pgd")])
    with matplotlib.rc_context({"lines.linewidth": 9.0, "axes.labelsize": 31.0, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        styled = report_page(result)
        assert dict(matplotlib.rcParams) == before
    assert styled == report_page(result), "the page does not follow the reader's own style"


def test_examples():
    """Inputs that are no images are left out; captions name the sample."""
    clean = np.full((1, 4, 4), 0.5)
    vector = make_example(clean=np.zeros(5))
    moved = make_example(clean=clean, candidate=clean - 0.125, outcome="beyond_epsilon", sample=17)
    page = Page(report_page(KINDS["binarization"]("pgd"), [vector, moved, make_example()]))
    assert {"17", "0.125"} <= set(re.findall(r"[\d.]*\d", page.text))
    assert len(re.findall("image/png", str(page.attributes))) == 6
    assert "image/png" not in str(Page(report_page(KINDS["mead"]("pgd"), [vector, vector])).attributes)


def test_files_of_a_result(tmp_path):
    result = make_result([make_attack("攻撃 \ud800")])
    folder = tmp_path / "deep" / "run"
    save(result, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["badge.svg", "report.html", "result.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert json.loads((folder / "result.json").read_text(encoding="utf-8")) == {"format": 2, **result}
    assert (folder / "report.html").read_text(encoding="utf-8") == report_page(result)
    assert (folder / "badge.svg").read_text(encoding="utf-8") == reports.badge(result)
    save({**result, "seed": 2}, str(folder))
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["seed"] == 2


def test_refuses_numbers_that_json_does_not_know(tmp_path):
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            save(make_result([make_attack("pgd", score=value)]), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    save(make_result([make_attack("pgd")], seed=1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError("no space left on device")))
    with pytest.raises(DataError, match="no space"):
        save(make_result([make_attack("pgd")], seed=2), tmp_path)
    assert {path.name: path.read_bytes() for path in Path(tmp_path).iterdir()} == before
