"""The examples of docs/causes, taken from the pages and run: what fails has the finding of its section, the fixed none.

In the ``diff`` block under a heading, lines without ``+`` are what fails, those without ``-`` what is fixed. Both begin
with the ``python`` block of docs/my_attack_failed.md, and end with a diagnosis or a ``result`` of their own.
"""

import re
from pathlib import Path

import pytest

import robust_ext
from robust_ext.evaluations.causes.finding import CODES

DOCS = Path(__file__).parents[3] / "docs"
# The table of all findings and what the examples share; the sections themselves, in the table's order.
PAGE = DOCS / "my_attack_failed.md"
TEXT = PAGE.read_text(encoding="utf-8")
_NAMES = "setup gradients losses directions steps lengths returns model comparisons depth other_verdicts"
PAGES = [DOCS / "causes" / f"{name}.md" for name in _NAMES.split()]
# Findings that need other attacks on the same samples.
COMPARED = ("random_wins", "gradient_free_wins", "single_step_wins", "transfer_wins", "larger_budget_less")
COMPARED += ("unbounded_fails", "loop_at_fault", "weaker_kind")


def _block(kind, text):
    (found,) = re.findall(f"```{kind}\n(.*?)```", text, re.DOTALL)
    return found


def _sections():
    """What stands under each heading, which is the code of a finding or words."""
    found = {}
    for page in PAGES:
        parts = re.split(r"^## `?(.+?)`?\n", page.read_text(encoding="utf-8"), flags=re.M)
        found |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return found


SECTIONS = _sections()


def printed(title):
    return " ".join(_block("text", SECTIONS[title]).split())


def shared():
    names = {}
    exec(_block("python", TEXT), names)  # noqa: S102 - our own page
    return names


def run(code, dropped):
    """The result of what fails (``"+"`` is dropped) or of what is fixed (``"-"``)."""
    names, diff = shared(), _block("diff", SECTIONS[code])
    lines = [line[1:] for line in diff.splitlines() if not line.startswith(dropped)]
    exec("\n".join(lines), names)  # noqa: S102 - our own page
    if "result" in names:
        return names["result"]
    given = (names[name] for name in ("model", "attack", "inputs", "labels", "threat_model"))
    return robust_ext.diagnose(*given, references=code in COMPARED)


def shown(result, title):
    """What the evaluation prints: the finding of this code, or the first where the title is none, else the verdict."""
    found = next((one for one in result.findings if one.code == title or title not in CODES), None)
    if found is not None:
        return f"[{found.weight}] {found.cause}"
    if title in CODES or "verdict" not in result.content:
        return None
    return f"Verdict: {result.verdict.upper()}. {result.content['reason']}"


def measured(result):
    """Robust accuracy, and the share of planted examples that are found; None where nothing came back."""
    content = result.content
    if content["kind"] == "test_time":
        return content["defended"]["worst_case"]["robust_accuracy"], None
    if content["kind"] == "mead":
        (arm,) = content["arms"]
        return 1 - arm["successes"] / arm["samples"], None
    if not content["attacks"]:
        # The model is refused.
        return None, None
    attack, *_ = content["attacks"]
    if content["kind"] == "binarization":
        # Where a verdict is taken at the planted points, what others prove deeper.
        deepest = attack["depths"][-1]
        return None, deepest["found_by_others"] / deepest["problems_by_others"]
    if content["kind"] == "robust_accuracy":
        (at,) = attack["robust_accuracy"]
        return at["robust_accuracy"], None
    return attack["robust_accuracy"], attack["score"]


def change(before, after):
    if "verdict" in after.content and before.verdict != after.verdict:
        return f"{before.verdict.capitalize()} → {after.verdict}."
    parts = []
    pairs = zip(("robust accuracy", "test score"), ("{:.1%}", "{:.2f}"), measured(before), measured(after), strict=True)
    for name, unit, *pair in pairs:
        if pair != [None, None]:
            then, now = ("none" if value is None else unit.format(value) for value in pair)
            parts.append(f"{name} {then} → {now}")
    words = "; ".join(parts)
    return f"{words[0].upper()}{words[1:]}."


RUN = [title for title, text in SECTIONS.items() if "```diff" in text]
FIGURE = r"\d+\.?\d*"


def found(result):
    """Shares of samples and of planted examples for which an adversarial example is found."""
    robust, score = measured(result)
    return (0.0 if robust is None else 1 - robust), score or 0.0


def shares(words):
    return [float(value) / (100 if unit else 1) for value, unit in re.findall(r"(\d+\.\d+)(%?)", words)]


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=() if title == "zero_gradient" else pytest.mark.exhaustive) for title in RUN]
)
def test_the_failing_lines_have_the_finding_and_the_fixed_ones_find_more(title):
    before, after = run(title, "+"), run(title, "-")
    (stated,) = re.findall(r"^\*\*Before and after\.\*\* (.*)$", SECTIONS[title], re.MULTILINE)
    if title in CODES:
        assert before.findings[0].code == title
    assert [one.code for one in after.findings if one.weight != "low" or one.code == title] == []
    if shown(before, title).startswith("Verdict"):
        assert (before.verdict, after.verdict) == ("inconclusive", "passed")
    else:
        assert all(more >= less for less, more in zip(found(before), found(after), strict=True))
        assert found(after) > found(before)
    for now, on_page in ((shown(before, title), printed(title)), (change(before, after), stated)):
        assert re.sub(FIGURE, "#", now) == re.sub(FIGURE, "#", on_page)
    # Other machines round otherwise: a sample more or less.
    assert shares(change(before, after)) == pytest.approx(shares(stated), abs=0.07)


def test_every_finding_has_a_section_and_every_section_stands_in_the_contents():
    assert {*CODES} <= {*SECTIONS}
    # Logarithms of probabilities alone need no mending.
    assert {*SECTIONS} - {*RUN} == {"log_probabilities"}
    contents = r"\[`?([^`\]]+)`?\]\(causes/\w+\.md#[\w-]+\) \|$"
    assert re.findall(contents, TEXT, re.MULTILINE) == [*SECTIONS]
