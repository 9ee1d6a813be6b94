"""Pages in the light and in the dark: text, tables and plots keep the contrast that WCAG 2 asks for."""

import base64
import re
from pathlib import Path

import pytest

from robust_ext import reports
from robust_ext.reports.plots import COLOURS, DARK, INK, MUTED
from tests.reports.pages import contrast, luminance
from tests.reports.test_pages import KINDS

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

STYLE = (Path(reports.__file__).parent / "page.css").read_text(encoding="utf-8")
LIGHT, NIGHT = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", part))
    for part in re.findall(r":root \{(.*?)\n *\}", STYLE, flags=re.DOTALL)
)


def mixed(one, other, weight):
    pairs = [(int(one[place : place + 2], 16), int(other[place : place + 2], 16)) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(weight * a + (1 - weight) * b):02x}" for a, b in pairs)


@pytest.mark.parametrize("scheme", [LIGHT, NIGHT], ids=["light", "dark"])
def test_text_is_readable_in_both_schemes(scheme):
    assert set(NIGHT) == set(LIGHT)
    verdicts = ("passed", "failed", "inconclusive")
    washes = ["paper", "wash", *(f"{verdict}-wash" for verdict in verdicts)]
    own = {verdict: ["paper", f"{verdict}-wash"] for verdict in verdicts}
    for ink, papers in {"ink": washes, "muted": washes, "link": ["paper"], **own}.items():
        for paper in papers:
            assert contrast(scheme[ink], scheme[paper]) >= 4.5, (ink, paper)
    for end in ("low", "high"):
        for part in range(11):
            assert contrast(scheme["ink"], mixed(scheme[end], scheme["middle"], part / 10)) >= 4.5, (end, part)


def test_plots_are_readable_in_the_dark():
    paper = DARK["#ffffff"]
    assert paper == NIGHT["paper"]
    assert luminance(paper) < 0.02
    assert all(contrast(DARK[text], paper) >= 4.5 for text in (INK, MUTED))
    assert all(contrast(DARK[colour], paper) >= 3 for colour in COLOURS)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_in_the_dark_and_on_narrow_screens(kind):
    """Plots have no colour that stays as it is in the dark; wide tables scroll or turn their rows into blocks."""
    page = reports.report_page(KINDS[kind]("pgd"))
    for image in re.findall(r"data:image/svg\+xml;base64,([^\"]*)", page):
        style, rest = base64.b64decode(image).decode().split("</style>", 1)
        colours = re.findall(r"(.{0,20})(#[0-9a-f]{6})\b", rest)
        assert [before for before, colour in colours if not before.endswith(f"var(--c{colour[1:]}, ")] == []
        assert all(f"--c{colour[1:]}: {DARK[colour]};" in style for _, colour in colours)
    for before, attributes, content in re.findall(r"([^\n]*)\n?<table([^>]*)>(.*?)</table>", page, flags=re.DOTALL):
        assert 'class="pairs"' in attributes or 'class="scroll" tabindex="0" role="region" aria-label="' in before
        assert "stack" not in attributes or '<td class="number">' not in content, "a number without its column's title"
