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


def case(result, about, found):
    return pytest.param(result, about, found, id=result["kind"] + result.get("verdict", ""))


MEAD, BEST, NAME = of_mead()
CASES = [
    *(
        case(make_result([make_attack("pgd")], verdict=verdict), "attack finds what is planted", verdict)
        for verdict in ("passed", "failed", "inconclusive")
    ),
    case(make_robust_accuracy("pgd"), "robust accuracy, l2 1", "≤ 40.0%"),
    case(make_adaptive("pgd", epsilon=8 / 255), "robust accuracy, linf 8/255", "≤ 48.0%"),
    case(make_diagnosis("pgd", findings=[]), "attack diagnosis", "0 findings"),
    case(MEAD, f"worst-case AUROC, {NAME}", f"{shown(BEST)}%"),
]


def read(text):
    """The title and the texts of a badge."""
    root = ElementTree.fromstring(text)
    return root, [element.text for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(("result", "about", "found"), CASES)
def test_badge_has_the_verdict_or_the_main_number(result, about, found):
    root, texts = read(badge(result))
    assert texts == [about, found]
    assert root.find(f"{SVG}title").text == root.get("aria-label") == f"{about}: {found}"
    assert root.get("role") == "img"


def test_counts_of_findings_and_case_studies():
    weak = make_diagnosis("pgd")
    number = sum(finding["weight"] != "low" for finding in weak["findings"])
    assert f"{number} finding" in read(badge(weak))[1][1]
    studies = make_case_studies("pgd")
    assert read(badge(studies))[1] == [
        "recipes judged rightly",
        f"{studies['flagged'] + studies['passed']} of {2 * len(studies['studies'])}",
    ]


def test_nothing_of_a_name_becomes_markup_and_nothing_is_loaded():
    result, *_ = of_mead(NASTY)
    for one in (make_robust_accuracy("pgd", norm=NASTY), result):
        text = badge(one)
        text.encode("utf-8")
        root, texts = read(text)
        elements = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert elements == {"svg", "title", "rect", "path", "g", "text"}
        assert "href" not in text
        assert all(len(words) <= 40 for words in texts)
    assert texts[0].startswith("worst-case AUROC, <script>alert")
    assert "&lt;script&gt;" in badge(make_robust_accuracy("pgd", norm=NASTY))


def test_words_fit_and_are_readable():
    for result, *_ in (one.values for one in CASES):
        root, _ = read(badge(result))
        whole, left = root.find(f"{SVG}rect"), root.find(f"{SVG}path")
        assert whole.get("width") == root.get("width")
        assert all(contrast("#ffffff", half.get("fill")) >= 4.5 for half in (left, whole))
        middle = int(left.get("d").split("H")[1].split("V")[0])
        for begin, end, words in zip(
            (0, middle), (middle, int(whole.get("width"))), root.iter(f"{SVG}text"), strict=True
        ):
            start, length = int(words.get("x")), int(words.get("textLength"))
            assert begin + 6 <= start
            assert start + length + 6 <= end
            assert 4 <= length / len(words.text) <= 9
