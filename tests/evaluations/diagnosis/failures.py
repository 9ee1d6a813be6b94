"""The examples of docs/causes: what fails and what is fixed, taken from the pages and run.

Under each heading stands at most one ``diff`` block. Its lines without ``+`` are what fails, those without ``-``
what is fixed. Both begin with the ``python`` block of
docs/my_attack_failed.md, and end with a diagnosis or a ``result`` of their own.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import robust_ext
from robust_ext.evaluations.causes.finding import CODES, Finding
from robust_ext.evaluations.result import EvaluationResult

DOCS = Path(__file__).parents[3] / "docs"
# The table of all findings and what the examples share; the sections themselves, in the table's order.
PAGE = DOCS / "my_attack_failed.md"
PAGES = [
    DOCS / "causes" / f"{name}.md"
    for name in (
        *("setup", "gradients", "losses", "directions", "steps", "lengths"),
        *("returns", "model", "comparisons", "depth", "other_verdicts"),
    )
]
# Findings that need other attacks on the same samples.
COMPARED = ("random_wins", "gradient_free_wins", "single_step_wins", "transfer_wins", "larger_budget_less")
COMPARED += ("unbounded_fails", "loop_at_fault", "weaker_kind")
_BLOCK = "```{}\n(.*?)```"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, the code of a finding or words, and what stands under it."""

    code: str
    text: str

    def block(self, kind):
        """The text of its only block of this kind."""
        (found,) = re.findall(_BLOCK.format(kind), self.text, re.DOTALL)
        return found

    @property
    def runs(self):
        """Whether it has lines to run."""
        return "```diff" in self.text

    @property
    def printed(self):
        """What the page shows of the finding, in one line."""
        return " ".join(self.block("text").split())

    @property
    def change(self):
        """What the page states of the result."""
        (found,) = re.findall(r"^\*\*Before and after\.\*\* (.*)$", self.text, re.MULTILINE)
        return found


@lru_cache
def sections():
    """All sections of the pages, by code and in their order."""
    found = {}
    for page in PAGES:
        parts = re.split(r"^## `?(.+?)`?\n", page.read_text(encoding="utf-8"), flags=re.M)
        found |= {code: Section(code=code, text=text) for code, text in zip(parts[1::2], parts[2::2], strict=True)}
    return found


def half(diff, dropped):
    """One of the two programs of a block."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(dropped))


def shared():
    """The names that all examples begin with."""
    (block,) = re.findall(_BLOCK.format("python"), PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(block, names)  # noqa: S102 - our own page
    return names


def run(code, dropped, *, references=False):
    """The result of what fails (``"+"`` is dropped) or of what is fixed (``"-"``)."""
    names = shared()
    exec(half(sections()[code].block("diff"), dropped), names)  # noqa: S102 - our own page
    if "result" in names:
        return names["result"]
    given = (names[name] for name in ("model", "attack", "inputs", "labels", "threat_model"))
    return robust_ext.diagnose(*given, references=references or code in COMPARED)


@lru_cache
def results(code):
    """The results of what fails and of what is fixed."""
    return run(code, "+"), run(code, "-")


def finding(result: EvaluationResult, title) -> Finding | None:
    """The finding of this code, or the first, where the title is none."""
    return next((one for one in result.findings if one.code == title or title not in CODES), None)


def shown(result: EvaluationResult, title):
    """What the evaluation prints: the finding without the attack's name, else the verdict; None where neither is."""
    found = finding(result, title)
    if found is not None:
        return f"[{found.weight}] {found.cause}"
    if title in CODES or "verdict" not in result.content:
        return None
    return f"Verdict: {result.verdict.upper()}. {result.content['reason']}"


def measured(result: EvaluationResult):
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
    """Both results in words."""

    def arrow(pair, unit):
        then, now = ("none" if value is None else unit.format(value) for value in pair)
        return f"{then} → {now}"

    if "verdict" in after.content and before.verdict != after.verdict:
        return f"{before.verdict.capitalize()} → {after.verdict}."
    robust, score = zip(measured(before), measured(after), strict=True)
    pairs = ("robust accuracy", robust, "{:.1%}"), ("test score", score, "{:.2f}")
    words = "; ".join(f"{name} {arrow(pair, unit)}" for name, pair, unit in pairs if pair != (None, None))
    return f"{words[0].upper()}{words[1:]}."
