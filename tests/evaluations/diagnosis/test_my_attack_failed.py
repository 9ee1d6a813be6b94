"""docs/causes: what fails has the finding of its section, and what is fixed has none.

docs/findings.md has every code with its weight, in order, and every key of a trace.
"""

import re

import pytest
from torch import nn

from robust_ext.engine.trace import COLUMNS
from robust_ext.evaluations.causes.finding import CODES
from robust_ext.evaluations.causes.probes import probe_model
from tests.evaluations.diagnosis.failures import PAGE, change, measured, results, sections, shared, shown

QUICK = ("zero_gradient",)
FINDINGS, THEORY = ((PAGE.parent / page).read_text(encoding="utf-8") for page in ("findings.md", "theory/diagnosis.md"))
FIGURE = r"\d+\.?\d*"


def found(result):
    """Shares of samples and of planted examples for which an adversarial example is found."""
    robust, score = measured(result)
    return (0.0 if robust is None else 1 - robust), score or 0.0


def shares(words):
    return [float(value) / (100 if unit else 1) for value, unit in re.findall(r"(\d+\.\d+)(%?)", words)]


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=() if title in QUICK else pytest.mark.exhaustive)
        for title, section in sections().items()
        if section.runs
    ],
)
def test_the_failing_lines_have_the_finding_and_the_fixed_ones_find_more(title):
    pytest.importorskip("foolbox")
    section, (before, after) = sections()[title], results(title)
    if title in CODES:
        assert before.findings[0].code == title
    assert [one.code for one in after.findings if one.weight != "low" or one.code == title] == []
    if shown(before, title).startswith("Verdict"):
        assert (before.verdict, after.verdict) == ("inconclusive", "passed")
    else:
        assert all(more >= less for less, more in zip(found(before), found(after), strict=True))
        assert found(after) > found(before)
    for now, stated in ((shown(before, title), section.printed), (change(before, after), section.change)):
        assert re.sub(FIGURE, "#", now) == re.sub(FIGURE, "#", stated)
    # Other machines round otherwise: a sample more or less.
    assert shares(change(before, after)) == pytest.approx(shares(section.change), abs=0.07)


def test_logarithms_of_probabilities_are_all_that_needs_no_mending():
    assert [title for title, section in sections().items() if not section.runs] == ["log_probabilities"]
    names = shared()
    model = nn.Sequential(names["network"], nn.LogSoftmax(1))
    (found,) = probe_model(model, names["inputs"], names["labels"], threat_model=names["threat_model"]).findings
    assert found.code == "log_probabilities"
    assert f"[low] {found.cause}" == sections()["log_probabilities"].printed


def test_every_finding_has_a_section_and_every_section_stands_in_the_contents():
    assert {*CODES} <= {*sections()}
    listed = re.findall(
        r"\[`?([^`\]]+)`?\]\(causes/\w+\.md#[\w-]+\) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert listed == [*sections()]


def section(title, page=FINDINGS):
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_keys_of_a_trace_are_documented():
    first_columns = [line.split("|")[1] for line in section("The trace").splitlines() if line.startswith("| `")]
    assert {key for cell in first_columns for key in re.findall(r"`(\w+)`", cell)} == set(COLUMNS)
