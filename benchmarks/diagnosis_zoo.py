"""The diagnosis on known faults and their healthy twins: what it names, and what its remedies change.

    python benchmarks/diagnosis_zoo.py [--only WORDS] [--write]

``--write`` puts the tables into docs/evidence/faults.md. The faults are those of tests/evaluations/diagnosis/zoo, each
on 12 digits (two on images of CIFAR-10, where the published ResNet-20 is beside the project).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from common import page_options

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.evaluations.diagnosis.zoo.cases import FAULTS, Fault
from tests.evaluations.diagnosis.zoo.networks import available
from tests.evaluations.diagnosis.zoo.running import (
    best_trial,
    diagnosed,
    falsely_confirmed,
    first_cause,
    samples,
    truth,
    worsened,
)

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "faults.md"
BEGIN, END = (f"<!-- {word}: python benchmarks/diagnosis_zoo.py -->" for word in ("begin", "end"))
HARMS = {"score": "score", "accuracy": "robust accuracy", "refused": "accuracy by hand"}


def named(code: str | None, layer: str | None) -> str:
    """Code and layer as Markdown."""
    if code is None:
        return "nothing"
    return f"`{code}`" + (f" in `{layer}`" if layer else "")


def row(fault: Fault) -> dict[str, Any]:
    """What is measured of one fault and its twin, with and without the diagnosis."""
    measured, (ill, healthy) = truth(fault), diagnosed(fault)
    trial = best_trial(ill)
    return {
        "fault": fault,
        "truth": f"{HARMS[fault.harm]} {measured['fault']:.2f} / {measured['twin']:.2f}",
        "found": first_cause(ill),
        "twin": [one.code for one in healthy.findings if one.weight != "low"],
        "trial": trial,
        "worsened": worsened(ill),
        "falsely": falsely_confirmed(ill),
    }


def remedy_words(trial: tuple[Any, float | None, float] | None) -> tuple[str, str]:
    """The remedy and what it changes."""
    if trial is None:
        return "", ""
    remedy, before, after = trial
    shown = remedy if isinstance(remedy, str) else ", ".join(f"{key}={value!r}" for key, value in remedy.items())
    return (
        f"`{shown}`" if shown else "`model.eval()`",
        f"{'refused' if before is None else f'{before:.2f}'} → {after:.2f}",
    )


def cases_table(rows: list[dict[str, Any]]) -> list[str]:
    """One line a fault."""
    lines = [
        "| fault | with it / without | expected | named first | twin | remedy that was tried | test score |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        fault, right = one["fault"], one["found"] == (one["fault"].code, one["fault"].layer)
        twin = ", ".join(f"`{code}`" for code in one["twin"]) or "nothing"
        words, change = remedy_words(one["trial"])
        found = "the same" if right else named(*one["found"])
        expected = named(fault.code, fault.layer)
        lines.append(f"| {fault.name} | {one['truth']} | {expected} | {found} | {twin} | {words} | {change} |")
    return lines


def confusion_table(rows: list[dict[str, Any]]) -> list[str]:
    """How often each expected code was named as each."""
    counts = Counter((one["fault"].code, one["found"][0] or "nothing") for one in rows)
    counts.update(("(healthy twin)", one["twin"][0] if one["twin"] else "nothing") for one in rows)
    expected = [*dict.fromkeys(one["fault"].code for one in rows), "(healthy twin)"]
    return [
        "| expected | named first |",
        "|---|---|",
        *(
            f"| {code} | {', '.join(f'{name} {count}' for (of, name), count in counts.items() if of == code)} |"
            for code in expected
        ),
    ]


def summary(rows: list[dict[str, Any]]) -> str:
    """The counts in words."""
    right = sum(one["found"] == (one["fault"].code, one["fault"].layer) for one in rows)
    layered = [one for one in rows if one["fault"].layer]
    layers = sum(one["found"][1] == one["fault"].layer for one in layered)
    healthy = sum(not one["twin"] for one in rows)
    trials = [one["trial"] for one in rows if one["trial"] is not None and one["trial"][1] is not None]
    fixed = sum(before < 0.5 and after >= 0.95 for _, before, after in trials)
    return (
        f"{len(rows)} faults: {right} named rightly, {layers} of {len(layered)} layers among them; {healthy} of "
        f"{len(rows)} twins without a finding of weight; for {fixed} a proposed remedy, run as printed, brings the "
        "test score from below .5 to at least .95. The remedy that is printed first finds less than the attack without "
        f"it for {sum(one['worsened'] for one in rows)}; {sum(len(one['falsely']) for one in rows)} that find no more "
        "are called confirmed."
    )


def main() -> None:
    """Run all and print the tables."""
    arguments = page_options(__doc__, runs="faults")
    rows = []
    for fault in FAULTS:
        if arguments.only not in fault.name or (fault.published and not available()):
            continue
        rows.append(row(fault))
        print("\n".join(cases_table(rows[-1:])[2:]), flush=True)
    count = len(samples(FAULTS[0])[0])
    lines = [
        summary(rows),
        f"On {count} samples each. The second column holds what was measured without the diagnosis. A crash counts "
        "as a score of 0; where no remedy stands, code has to be changed, or there is nothing to score.",
        "",
        *cases_table(rows),
        "",
        *confusion_table(rows),
    ]
    print("\n".join(lines))
    if arguments.write:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN, "", *lines, "", END]) + rest.split(END)[1])


if __name__ == "__main__":
    main()
