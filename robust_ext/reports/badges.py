"""A badge for a README: what was tested and what came of it, as a small SVG that needs nothing else."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Mapping
from typing import Any, NamedTuple

from robust_ext.reports import findings, mead_views
from robust_ext.reports.wording import count, percent, plain, typed

_COLOURS = {"passed": "#00664d", "failed": "#a33600", "inconclusive": "#4c4a7d", "number": "#12355b"}
_LONGEST = 40


class Words(NamedTuple):
    """The subject of a badge, its text, and a verdict, or ``"number"`` without one."""

    about: str
    found: str
    verdict: str = "number"


def draw_badge(words: Words) -> str:
    """The SVG, 20 pixels high; texts are escaped, and cut where they are long."""
    about, found = (_cut(plain(text)) for text in words[:2])
    left, right = (round(_width(text)) + 12 for text in (about, found))
    title = html.escape(f"{about}: {found}")
    texts = "".join(
        f'<text x="{place}" y="14" textLength="{length}" lengthAdjust="spacingAndGlyphs">{html.escape(text)}</text>'
        for place, length, text in ((6, left - 12, about), (left + 6, right - 12, found))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{title}">'
        f'<title>{title}</title><rect width="{left + right}" height="20" rx="3" fill="{_COLOURS[words.verdict]}"/>'
        f'<path d="M3 0H{left}V20H3a3 3 0 0 1 -3 -3V3a3 3 0 0 1 3 -3z" fill="#3e4c59"/>'
        f'<g fill="#ffffff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g></svg>\n'
    )


def binarization(result: Mapping[str, Any]) -> Words:
    """The verdict of the strongest attack."""
    return Words("attack finds what is planted", result["verdict"], result["verdict"])


def mead(result: Mapping[str, Any]) -> Words:
    """The lowest AUROC of any group of arms, white-box ones too, past the detector for which that is highest."""
    lowest = {
        detector["name"]: row["auroc"]
        for detector in result["detectors"]
        if (row := mead_views.lowest_row(one for group in mead_views.groups_of(detector) for _, one in group.scenarios))
    }
    if not lowest:
        return Words("worst-case AUROC", "none")
    name = max(lowest, key=lambda one: lowest[one])
    return Words(f"worst-case AUROC, {plain(name)}", f"{percent(lowest[name])}%")


def robust_accuracy(result: Mapping[str, Any]) -> Words:
    """The worst case at the largest budget, an upper bound as all such numbers are."""
    worst = result["worst_case"][-1]
    about = f"robust accuracy, {result['norm']} {typed(worst['epsilon'])}"
    return Words(about, f"≤ {percent(worst['robust_accuracy'])}%")


def adaptive(result: Mapping[str, Any]) -> Words:
    """The worst case of the defense."""
    about = f"robust accuracy, {result['norm']} {typed(result['epsilon'])}"
    return Words(about, f"≤ {percent(result['defended']['worst_case']['robust_accuracy'])}%")


def diagnosis(result: Mapping[str, Any]) -> Words:
    """Count the findings that weaken an attack."""
    found = len(findings.weighty(result["findings"]))
    return Words("attack diagnosis", count(found, "finding"), "failed" if found else "passed")


def case_studies(result: Mapping[str, Any]) -> Words:
    """Count the rightly judged recipes."""
    number = 2 * len(result["studies"])
    right = result["flagged"] + result["passed"]
    return Words("recipes judged rightly", f"{right} of {number}", "passed" if right == number else "inconclusive")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _width(text: str) -> float:
    """About what the letters take at 11 pixels; the texts are then stretched to it."""
    return sum(
        11.0
        if unicodedata.east_asian_width(char) in "WF"
        else 3.9
        if char in "ijlI.,:;'|! ()[]"
        else 9.6
        if char in "mwMW%"
        else 6.9
        for char in text
    )
