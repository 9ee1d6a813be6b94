"""The badge of a result: its words, and that it is one small picture that holds nothing else."""

from xml.etree import ElementTree

import pytest

from robust_ext.reports import badge
from tests.reports.mead_results import arms_of, make
from tests.reports.pages import NASTY, contrast
from tests.reports.results import (
    make_adaptive,
    make_attack,
    make_case_studies,
    make_diagnosis,
    make_result,
    make_robust_accuracy,
    shown,
)

SVG = "{http://www.w3.org/2000/svg}"


def of_mead(name="nss"):
    """A result of two detectors, the lowest AUROC of each, and the highest of these."""
    result = make(arms_of("l1 5", "linf 0.125"), [name, "lid"], samples=60, white_box=["lid"])
    lowest = [
        min(row["auroc"] for row in (*one["results"], *one["white_box"]) if not (row["objective"] or row["algorithm"]))
        for one in result["detectors"]
    ]
    return result, max(lowest), (name, "lid")[lowest.index(max(lowest))]


MEAD, BEST, NAME = of_mead()
CASES = [
    *(
        (make_result([make_attack("pgd")], verdict=verdict), "attack finds what is planted", verdict)
        for verdict in ("passed", "failed", "inconclusive")
    ),
    (make_robust_accuracy("pgd"), "robust accuracy, l2 1", "≤ 40.0%"),
    (make_adaptive("pgd", epsilon=8 / 255), "robust accuracy, linf 8/255", "≤ 48.0%"),
    (make_diagnosis("pgd", findings=[]), "attack diagnosis", "0 findings"),
    (make_case_studies("pgd"), "recipes judged correctly", "4 of 4"),
    (MEAD, f"worst-case AUROC, {NAME}", f"{shown(BEST)}%"),
]


@pytest.mark.parametrize(("result", "about", "found"), CASES)
def test_badge_has_the_verdict_or_the_main_number(result, about, found):
    """Its words are readable and fit."""
    root = ElementTree.fromstring(badge(result))
    texts = list(root.iter(f"{SVG}text"))
    assert [element.text for element in texts] == [about, found]
    assert root.find(f"{SVG}title").text == root.get("aria-label") == f"{about}: {found}"
    whole, left = root.find(f"{SVG}rect"), root.find(f"{SVG}path")
    assert all(contrast("#ffffff", half.get("fill")) >= 4.5 for half in (left, whole))
    middle = int(left.get("d").split("H")[1].split("V")[0])
    for begin, end, words in zip((0, middle), (middle, int(whole.get("width"))), texts, strict=True):
        start, length = int(words.get("x")), int(words.get("textLength"))
        assert begin + 6 <= start
        assert start + length + 6 <= end
        assert 4 <= length / len(words.text) <= 9


def test_nothing_of_a_name_becomes_markup_and_nothing_is_loaded():
    for one in (make_robust_accuracy("pgd", norm=NASTY), of_mead(NASTY)[0]):
        text = badge(one)
        text.encode("utf-8")
        root = ElementTree.fromstring(text)
        assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
            "svg",
            "title",
            "rect",
            "path",
            "g",
            "text",
        }
        assert "href" not in text
        assert all(len(element.text) <= 40 for element in root.iter(f"{SVG}text"))
        assert "&lt;script&gt;" in text
