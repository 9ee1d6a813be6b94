"""Findings of the diagnosis in texts: what is wrong, by what evidence, and what to do, of their plain dicts.

The dicts are those of :meth:`robust_ext.evaluations.causes.finding.Finding.to_dict`; pages show them by the macro
``finding`` of ``page.html.jinja``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from robust_ext.core.errors import printable
from robust_ext.core.tabular import paragraph
from robust_ext.core.wording import plain

Finding = Mapping[str, Any]

SETUP = (
    "label_offset",
    "label_order",
    "reversed_logits",
    "input_scale",
    "input_layout",
    "batch_statistics",
    "constant_output",
    "chance_accuracy",
    "threat_scale",
)
"""Codes of a setup that is wrong whatever the attack; they stand above all numbers."""

# Attacks that share a finding and are named in its sentence.
_NAMED = 3


def weighty(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of high or medium weight."""
    return [finding for finding in findings if finding["weight"] != "low"]


def leading(findings: Iterable[Finding]) -> list[Finding]:
    """Return the weighty findings on the model and the first on each attack, which explains its others."""
    weak = weighty(findings)
    first = {finding["attack"]: finding for finding in reversed(weak)}
    return [finding for finding in weak if finding["attack"] is None or finding is first[finding["attack"]]]


def sentence(finding: Finding) -> str:
    """Return the cause and its first evidence, with samples and layer unless the words name them."""
    evidence = finding["evidence"][:1]
    words, more = " ".join((finding["cause"], *evidence)), []
    if finding["samples"] is not None and (counted := f"{finding['samples']} of {finding['of']}") not in words:
        more.append(f"{counted} {finding.get('unit', 'samples')}")
    if finding["layer"] and finding["layer"] not in words:
        more.append(f"layer {finding['layer']}")
    cause = _bare(finding["cause"]) + (f" ({', '.join(more)})" if more else "")
    return " ".join(f"{_bare(part)}." for part in (cause, *evidence))


def remedy(finding: Finding) -> str:
    """The first two remedies as a sentence, but for those that were tried and did not help; empty without any."""
    first, *others = [_bare(one["words"]) for one in finding["remedies"] if not failed(one)][:2] or [""]
    return f"{'; or '.join([first, *(f'{words[0].lower()}{words[1:]}' for words in others)])}." if first else ""


def failed(remedy: Mapping[str, Any]) -> bool:
    """Return whether a remedy was tried and did not help."""
    return remedy.get("tried", "") in ("changes nothing", "worse", "raised")


def label(remedy: Mapping[str, Any]) -> str:
    """Return the label of a remedy: tried or not, with the result."""
    return f"Tried, {remedy['tried']}" if failed(remedy) else "Remedy"


def to_paste(remedy: Mapping[str, Any]) -> list[str]:
    """Lines that run a remedy as they are; then, as comments, those for the inside of the user's attack or model."""
    inside = [f"#     {line}" for line in remedy["code"].splitlines()]
    lines = [*remedy.get("paste", "").splitlines(), *(["# In your own code:", *inside] if inside else [])]
    return [printable(line) for line in lines]


def divided(findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Findings about the setup, and the others."""
    setup, others = list[Finding](), list[Finding]()
    for one in findings:
        (setup if of_setup(one) else others).append(one)
    return setup, others


def of_setup(finding: Finding) -> bool:
    """Return whether a finding is about labels, inputs, outputs or the threat model."""
    return finding["code"] in SETUP or (finding["code"] == "wrong_bounds" and finding["attack"] is None)


def first_to_paste(findings: Iterable[Finding]) -> list[str]:
    """Lines that run the first remedy of each of the findings, by the attack."""
    found = []
    for finding, names in shared(findings):
        if lines := to_paste(finding["remedies"][0]) if finding["remedies"] else []:
            whose = "where attack is" if names and "(attack)" in " ".join(lines) else "for"
            found += [*paragraph(f"To paste, {whose} {subject(names) if names else 'the model'}:")]
            found += [f"    {line}" for line in lines]
    return found


def shared(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
    """Findings that several attacks share as one, with the attacks' names; no name for those of the model alone.

    Cause and remedies are those of the first attack, if any.
    """
    groups: dict[tuple[str, str | None], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding["code"], finding["layer"]), []).append(finding)
    of_attacks = [([one for one in group if one["attack"] is not None], group) for group in groups.values()]
    return [((mine or group)[0], [one["attack"] for one in mine]) for mine, group in of_attacks]


def subject(names: Sequence[str]) -> str:
    """Whom a finding is about."""
    more = len(names) - _NAMED
    return ", ".join(map(plain, names[:_NAMED])) + (f" and {more} more" if more > 0 else "") or "The model"


def sentences(findings: Iterable[Finding]) -> list[str]:
    """A sentence for the model and for each attack, where there is something wrong."""
    return [f"{subject(names)}: {plain(sentence(finding))}" for finding, names in shared(leading(findings))]


def lines(findings: Iterable[Finding]) -> list[str]:
    """A warning for the model and for each attack, with its remedy; the other findings are left to the page."""
    found = []
    for finding, names in shared(leading(findings)):
        found += paragraph(f"Warning: {subject(names)}: {plain(sentence(finding))}")
        if advice := remedy(finding):
            found += [f"  {line}" for line in paragraph(f"Remedy: {plain(advice)}")]
            found += [f"    {line}" for line in to_paste(finding["remedies"][0])]
    return found


def numbered(findings: Iterable[Finding]) -> list[str]:
    """Each finding with its weight, evidence and all remedies, ready to paste, after an empty line."""
    found = []
    for number, (finding, names) in enumerate(shared(findings), 1):
        found += ["", *paragraph(f"{number}. [{finding['weight']}] {subject(names)}: {plain(sentence(finding))}")]
        for one in finding["remedies"]:
            found += [f"  {line}" for line in paragraph(f"{label(one)}: {plain(one['words'])}")]
            found += [f"      {line}" for line in to_paste(one) if not failed(one)]
    return found


def _bare(words: str) -> str:
    """A sentence without its full stop."""
    return words.rstrip().rstrip(".")
