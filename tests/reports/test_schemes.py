"""Pages in the light and in the dark, on narrow screens and on paper: what the style sheet promises is there."""

import base64
import re
from itertools import pairwise
from pathlib import Path

import pytest

from robust_ext import reports
from robust_ext.reports.plots import COLOURS, DARK, INK, MUTED
from tests.reports.pages import contrast, luminance
from tests.reports.test_pages import KINDS

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

STYLE = (Path(reports.__file__).parent / "page.css").read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=KINDS)
def page(request):
    return reports.report_page(KINDS[request.param]("pgd"))


def variables(text):
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", text))


LIGHT, NIGHT = (variables(part) for part in re.findall(r":root \{(.*?)\n *\}", STYLE, flags=re.DOTALL))


def mixed(one, other, weight):
    pairs = [(int(one[place : place + 2], 16), int(other[place : place + 2], 16)) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(weight * a + (1 - weight) * b):02x}" for a, b in pairs)


def test_the_dark_mode_has_every_colour_of_the_light_one():
    assert set(NIGHT) == set(LIGHT)
    assert luminance(NIGHT["paper"]) < 0.02 < 0.9 < luminance(LIGHT["paper"])


@pytest.mark.parametrize("scheme", [LIGHT, NIGHT], ids=["light", "dark"])
def test_text_is_readable_in_both_schemes(scheme):
    for ink, papers in {
        "ink": ["paper", "wash", "passed-wash", "failed-wash", "inconclusive-wash"],
        "muted": ["paper", "wash", "passed-wash", "failed-wash", "inconclusive-wash"],
        "link": ["paper"],
        **{verdict: ["paper", f"{verdict}-wash"] for verdict in ("passed", "failed", "inconclusive")},
    }.items():
        for paper in papers:
            assert contrast(scheme[ink], scheme[paper]) >= 4.5, (ink, paper)
    for end in ("low", "high"):
        for part in range(11):
            assert contrast(scheme["ink"], mixed(scheme[end], scheme["middle"], part / 10)) >= 4.5, (end, part)


def test_plots_are_readable_in_the_dark():
    paper = DARK["#ffffff"]
    assert paper == NIGHT["paper"]
    assert all(contrast(DARK[text], paper) >= 4.5 for text in (INK, MUTED))
    assert all(contrast(DARK[colour], paper) >= 3 for colour in COLOURS)
    assert len(set(DARK.values())) >= len(DARK) - 3


def test_no_colour_of_a_plot_stays_as_it_is_in_the_dark(page):
    for image in re.findall(r"data:image/svg\+xml;base64,([^\"]*)", page):
        style, rest = base64.b64decode(image).decode().split("</style>", 1)
        colours = re.findall(r"(.{0,20})(#[0-9a-f]{6})\b", rest)
        assert {colour for _, colour in colours} <= set(DARK)
        assert [before for before, colour in colours if not before.endswith(f"var(--c{colour[1:]}, ")] == []
        assert "prefers-color-scheme: dark" in style
        assert all(f"--c{colour[1:]}: {DARK[colour]};" in style for _, colour in colours)


def test_wide_tables_are_not_cut_on_narrow_screens(page):
    """Each lies in a box of its own that scrolls and that a keyboard reaches, or turns its rows into blocks."""
    assert ".stack td[data-label]::before { content: attr(data-label);" in STYLE
    tables = re.findall(r"([^\n]*)\n?<table([^>]*)>(.*?)</table>", page, flags=re.DOTALL)
    assert tables
    for before, attributes, content in tables:
        if 'class="pairs"' in attributes:
            continue
        assert 'class="scroll" tabindex="0" role="region" aria-label="' in before
        if "stack" in attributes:
            assert '<td class="number">' not in content, "a number without its column's title"


def test_paper_shows_what_does_not_fit_or_is_folded():
    paper = STYLE[STYLE.index("@media print") :]
    assert ".scroll { overflow: visible; background: none; }" in paper
    assert "details::details-content { content-visibility: visible;" in paper
    assert [one for one in re.findall(r"@media ([^{]+?) \{", STYLE) if "print" not in one and "screen" not in one] == []


def test_headings_go_down_one_step_at_a_time(page):
    levels = [int(level) for level in re.findall(r"<h([1-4])\b", page)]
    assert levels[0] in (1, 2)
    assert all(after - before <= 1 for before, after in pairwise(levels))
