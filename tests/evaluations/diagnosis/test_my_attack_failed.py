"""docs/my_attack_failed.md: what fails has the finding of its section, and what is mended has none."""

import re

import pytest
from torch import nn

from robust_ext.evaluations.causes.finding import CODES
from robust_ext.evaluations.causes.probes import probe_model
from tests.evaluations.diagnosis.failures import PAGE, change, finding, measured, results, sections, shared, shown

QUICK = ("zero_gradient",)
FIGURE = r"\d+\.?\d*"


def found(result):
    """Shares of samples and of planted examples for which an adversarial example is found."""
    robust, score = measured(result)
    return (0.0 if robust is None else 1 - robust), score or 0.0


def shares(words):
    return [float(value) / (100 if unit else 1) for value, unit in re.findall(r"(\d+\.\d+)(%?)", words)]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, marks=() if code in QUICK else pytest.mark.exhaustive)
        for code, section in sections().items()
        if section.runs
    ],
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


def test_logarithms_of_probabilities_are_all_that_needs_no_mending():
    assert [code for code, section in sections().items() if not section.runs] == ["log_probabilities"]
    names = shared()
    model = nn.Sequential(names["network"], nn.LogSoftmax(1))
    (found,) = probe_model(model, names["inputs"], names["labels"], threat_model=names["threat_model"]).findings
    assert shown(found) == sections()["log_probabilities"].printed


def test_every_finding_has_a_section_and_stands_in_the_contents():
    assert {*sections()} <= {*CODES}
    listed = re.findall(r"\[`(\w+)`\]\(#\1\) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [*sections()]
