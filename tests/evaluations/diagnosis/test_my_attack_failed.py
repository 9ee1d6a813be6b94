"""docs/my_attack_failed.md: what fails has the finding of its section, and what is mended has none."""

import re

import pytest

from robust_ext.evaluations.causes.finding import CODES
from tests.evaluations.diagnosis.failures import PAGE, change, finding, measured, results, sections, shown

QUICK = ("zero_gradient",)
FIGURE = r"\d+\.?\d*"


def found(result):
    """Shares of samples and of planted examples for which an adversarial example is found."""
    robust, score = measured(result)
    return (0.0 if robust is None else 1 - robust), score or 0.0


def shares(words):
    return [float(value) / (100 if unit else 1) for value, unit in re.findall(r"(\d+\.\d+)(%?)", words)]


@pytest.mark.parametrize(
    "code", [pytest.param(code, marks=() if code in QUICK else pytest.mark.exhaustive) for code in sections()]
)
def test_the_failing_lines_have_the_finding_and_the_mended_ones_find_more(code):
    pytest.importorskip("foolbox")
    section, (before, after) = sections()[code], results(code)
    assert before.findings[0].code == code
    assert [one.code for one in after.findings if one.weight != "low" or one.code == code] == []
    assert all(more >= less for less, more in zip(found(before), found(after), strict=True))
    assert found(after) > found(before)
    for now, stated in ((shown(finding(before, code)), section.printed), (change(before, after), section.change)):
        assert re.sub(FIGURE, "#", now) == re.sub(FIGURE, "#", stated)
    # Other machines round otherwise: a sample more or less.
    assert shares(change(before, after)) == pytest.approx(shares(section.change), abs=0.07)


def test_every_finding_has_a_section_and_stands_in_the_contents():
    assert {*sections()} <= {*CODES}
    listed = re.findall(r"\[`(\w+)`\]\(#\1\) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [*sections()]
