"""Outputs for each kind of result: text, a page, a badge, files in a folder; each file appears whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_ext.core import finding_texts as findings
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError, printable
from robust_ext.core.files import make_folder, replace_file
from robust_ext.core.tabular import paragraph
from robust_ext.core.wording import plain, retyped, short_names, typed
from robust_ext.engine.context import current_context
from robust_ext.engine.verify import OUTCOMES
from robust_ext.reports import (
    adaptive,
    binarization,
    blocks,
    casestudies,
    diagnosis,
    evaluate,
    mead,
    reproduction,
    robust_accuracy,
    timing,
)
from robust_ext.reports.blocks import Block, Report, Section
from robust_ext.reports.pictures import Example, panels
from robust_ext.reports.plots import Drawing

if TYPE_CHECKING:
    from jinja2 import Template

Result = Mapping[str, Any]

FORMAT = 2
"""Of ``result.json``; grows where a reader of an older one would go wrong. Files without it are of format 1."""

# The report of each kind, and of what it has one or more.
_KINDS = {
    "binarization": (binarization.report, "attack"),
    "mead": (mead.report, "detector"),
    "robust_accuracy": (robust_accuracy.report, "attack"),
    "evaluation": (evaluate.report, ""),
    "case_studies": (casestudies.report, ""),
    "diagnosis": (diagnosis.report, ""),
    "reproduction": (reproduction.report, "figure"),
    "test_time": (adaptive.report, ""),
}
_LONGEST_BADGE = 40


def report_text(result: Result) -> str:
    """The content of ``result.json`` as text, without colour: columns as in :func:`robust_ext.core.tabular.room`.

    It is refused where its kind or verdict is none, or where it has no attacks or detectors.
    """
    report, result, full = _report(result)
    names = [line for short, name in full.items() for line in paragraph(f"{short} is {name}")]
    took = paragraph(timing.sentence(result)) if "time" in result else []
    return "\n".join([*report.lines(), *([""] * bool(names)), *names, "", *took, *([""] * bool(took))])


def report_page(result: Result, examples: Sequence[Example] = ()) -> str:
    """The content of ``result.json`` as one page: self-contained HTML, the same text for the same input.

    Examples are shown in their order; those that are no images are counted in a note. The command that repeats the run
    is that of the current run, or else a call of Python's.
    """
    report, result, full = _report(result)
    in_full = [Section("Attacks in full", [Block("terms", list(full.items()))])] if full else []
    sections = [*report.sections, *in_full, *timing.sections(result), _settings(result)]
    images = [(one, panels(one)) for one in examples if one.is_image]
    sections = [section for section in sections if examples or section.blocks != [Block("pictures", None)]]
    answers = blocks.answers(report.headline, result, _repeating(result))
    shown = {"report": report, "answers": answers, "sections": sections, "examples": images}
    shown |= {"left_out": len(examples) - len(images)}
    return template("page.html.jinja").render(shown).rstrip() + "\n"


def badge(result: Result) -> str:
    """A small SVG for a README: the verdict, or the main number without one; escaped, and of no other file."""
    *words, verdict = _report(result)[0].badge
    about, found = (
        text if len(text) <= _LONGEST_BADGE else f"{text[: _LONGEST_BADGE - 1]}…" for text in map(plain, words)
    )
    left, right = (round(sum(map(_width, text))) + 12 for text in (about, found))
    title, whole = html.escape(f"{about}: {found}"), left + right
    texts = "".join(
        f'<text x="{place}" y="14" textLength="{length}" lengthAdjust="spacingAndGlyphs">{html.escape(text)}</text>'
        for place, length, text in ((6, left - 12, about), (left + 6, right - 12, found))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="20" role="img" aria-label="{title}">'
        f'<title>{title}</title><rect width="{whole}" height="20" rx="3" fill="{_BADGE[verdict]}"/>'
        f'<path d="M3 0H{left}V20H3a3 3 0 0 1 -3 -3V3a3 3 0 0 1 3 -3z" fill="#3e4c59"/>'
        f'<g fill="#ffffff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g></svg>\n'
    )


_BADGE = {"passed": "#00664d", "failed": "#a33600", "inconclusive": "#4c4a7d", "number": "#12355b"}


def _width(char: str) -> float:
    """Return about what a letter takes at 11 pixels; texts are then stretched to it."""
    if unicodedata.east_asian_width(char) in "WF":
        return 11.0
    return 3.9 if char in "ijlI.,:;'|! ()[]" else 9.6 if char in "mwMW%" else 6.9


def figure(result: Result) -> Drawing:
    """The main figure of the page; InvalidArgumentError where there is nothing to draw."""
    found = _report(result)[0].figure
    if found is None:
        raise InvalidArgumentError("result", "no attack that was run", "at least one attack that made queries, to plot")
    return found


def leading_sentences(result: Result) -> list[str]:
    """Return a sentence on the model and on each attack for what is wrong; none where nothing is."""
    return findings.sentences(result.get("findings", ()))


def save(result: Result, folder: str | os.PathLike[str], examples: Sequence[Example] = ()) -> None:
    """Write ``result.json``, ``report.html`` and ``badge.svg`` to ``folder``, which is created when it is missing.

    All texts are made before the first file is written, so a result that cannot be written (NaN and infinity are not
    part of JSON) leaves the folder as it was. A file that is already there is replaced in one step. DataError where
    the operating system refuses.
    """
    content = json.dumps({"format": FORMAT, **result}, indent=2, allow_nan=False) + "\n"
    made = {"result.json": content, "report.html": report_page(result, examples), "badge.svg": badge(result)}
    folder = Path(folder)
    make_folder(folder)
    for name, text in made.items():
        replace_file(folder / name, text)


def _report(result: Result) -> tuple[Report, Result, dict[str, str]]:
    """Return the report and the result with short names of attacks, and what these stand for."""
    name = result.get("kind")
    if name not in _KINDS:
        raise InvalidArgumentError("result['kind']", name, f"one of {', '.join(map(repr, _KINDS))}")
    make, row = _KINDS[name]
    rows = result.get(f"{row}s")
    if row and (not isinstance(rows, Sequence) or isinstance(rows, str) or not rows):
        raise InvalidArgumentError(f"result['{row}s']", rows, f"a list with at least one {row}")
    full = {short: long for long, short in short_names(_names(result)).items()}
    short = _shortened(result, full) if full else result
    return _with_criterion(make(short), short), short, full


# What holds attacks, and what is shown as it is.
_ATTACKS = ("attacks", "references", "steps", "arms")
_VERBATIM = {"settings", "versions", "description", "text", "paste", "code", "command", "foolbox", "art", "view"}


def _names(result: Result) -> Iterator[str]:
    """Yield the names of the attacks, without what the names of arms add."""
    for one in (one for key in _ATTACKS for one in result.get(key) or ()):
        name = str(one["name"]).removesuffix(f", knowing {one.get('adaptive_to')}")
        yield name.removesuffix(f" {one.get('group')}")


def _shortened(result: Result, full: Mapping[str, str]) -> Result:
    """Return a result with the names of attacks shortened; ``full`` has what they stand for."""
    short = {long: name for name, long in full.items()}
    # Not those that are part of another text: an attack in another one's settings, or one with further settings.
    longest = sorted(map(re.escape, short), key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w./:'\"])(?:{'|'.join(longest)})(?![\w(])")

    def replaced(one: Any) -> Any:
        if isinstance(one, str):
            return pattern.sub(lambda found: short[found[0]], one)
        if isinstance(one, Mapping):
            return {replaced(key): each if key in _VERBATIM else replaced(each) for key, each in one.items()}
        return list(map(replaced, one)) if isinstance(one, (list, tuple)) else one

    found: Result = replaced(result)
    return found


def _with_criterion(report: Report, result: Result) -> Report:
    """The report, with what counts as success in front where that is another criterion than misclassification."""
    if "criterion" not in result:
        return report
    words = f"Success of an attack here: {plain(result['criterion'])}."
    if result["kind"] == "evaluation":
        words += " The test behind the certificate plants two classes of its own, for which this does not count."
    return replace(report, first=[Block("words", words), *report.first], text=[[words], *report.text])


# What repeats a run of each kind in Python.
_ATTACKED = "model, attacks, inputs, labels, threat_model"
_CALLS = {
    "binarization": ("binarization_test", "model, attacks, inputs, threat_model"),
    "mead": ("mead", f"{_ATTACKED}, detectors=detectors"),
    "robust_accuracy": ("robust_accuracy", _ATTACKED),
    "evaluation": ("evaluate", "model, inputs, labels, threat_model"),
    "case_studies": ("casestudies.run_case_studies", "names"),
    "diagnosis": ("diagnose", _ATTACKED),
    "reproduction": ("casestudies.reproduction.reproduce", "paper, item"),
    "test_time": ("evaluate_defense", "defense, attacks, inputs, labels, threat_model"),
}


def _repeating(result: Result) -> list[str]:
    """Return the lines of the command that repeats a run into a new folder, or the call of Python's."""
    seeds = {key: value for key, value in result["settings"].items() if key in ("seed", "judge_seed")}
    if command := current_context().command:
        own = [one for one in command if one != "--no-progress" and not one.startswith("--out=")]
        named = own[0] == "demo" or any(one.startswith("--judge-seed=") for one in own)
        judge = [] if named or "judge_seed" not in seeds else [f"--judge-seed={seeds['judge_seed']}"]
        return blocks.command_lines(["robust-ext", own[0], *judge, *own[1:]])
    function, given = _CALLS[result["kind"]]
    chosen = [f"{key}={value}" for key, value in ({"seed": result.get("seed", 0)} | seeds).items()]
    return [f"robust_ext.{function}({', '.join([given, *chosen])})"]


def _settings(result: Result) -> Section:
    """Return the settings, versions and seed of a run, without what only a program compares or another part shows."""
    made = {"seed": result["seed"]} if "seed" in result else {}
    if "isolated" in result:
        made["each attack in a process of its own"] = result["isolated"]
    pairs = {"Settings": result["settings"], "Versions and seed": {**made, **result["versions"]}}
    shown = {
        title: [
            (key, _setting(one))
            for key, one in values.items()
            if not (isinstance(one, Mapping) or re.fullmatch("[0-9a-f]{32}", str(one)))
        ]
        for title, values in pairs.items()
    }
    return Section("Settings, versions and seed", [Block("pairs", shown)])


def _setting(value: object) -> str:
    """Return a setting as text; numbers in full, so that a run can be repeated from its page."""
    if value is None or value == [] or value == ():
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(_setting, value)) if isinstance(value, (list, tuple)) else str(value)


@cache
def template(name: str) -> Template:
    """Return the template of this name; in HTML everything is escaped that is not marked as markup."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup, escape
    except ImportError as error:
        raise MissingDependencyError('A report page needs jinja2: pip install "robust-ext[cli]"') from error
    environment = Environment(
        loader=PackageLoader("robust_ext", "reports"),
        autoescape=name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is a subclass of str and passes; a name with a control character or half a surrogate is made printable.
        finalize=lambda value: retyped(plain(value)) if type(value) is str else value,
    )
    script = files("robust_ext.reports").joinpath("sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(OUTCOMES=OUTCOMES, script=Markup(script), script_digest=f"sha256-{digest}")
    environment.filters.update(
        typed=typed,
        to_paste=findings.to_paste,
        failed=findings.failed,
        label=findings.label,
        subject=findings.subject,
        # Lines as they are, with their indentation.
        code=lambda text: escape(retyped(printable(text))),
    )
    return environment.get_template(name)
