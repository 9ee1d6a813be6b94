"""The diagnosis on setups: what it names first where labels, inputs, model, outputs or threat model are wrong.

    python benchmarks/setups.py [--only WORDS] [--write]

``--write`` puts the table into docs/evidence/setups.md. The setups are those of
tests/evaluations/diagnosis/test_setups.py, each diagnosed with the default settings.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from common import page_options

sys.path.insert(0, str(Path(__file__).parents[1]))
from robust_ext import RobustExtWarning
from tests.evaluations.diagnosis.test_setups import MISTAKES, SOUND, diagnosed, first

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "setups.md"
BEGIN, END = (f"<!-- {word}: python benchmarks/setups.py -->" for word in ("begin", "end"))


def named(result: object, expected: str | None) -> str:
    """What is named first, as Markdown."""
    found = first(result)
    if found is None:
        return "nothing"
    if not isinstance(result, Exception):
        return f"`{found}`"
    return f"refused: {expected}" if expected and expected in found else f"refused: {found[:80]}"


def main() -> None:
    """Run all and print the table."""
    arguments = page_options(__doc__, runs="setups")
    warnings.simplefilter("ignore", RobustExtWarning)
    lines, right = ["| setup | named first | evidence |", "|---|---|---|"], dict.fromkeys((True, False), 0)
    for table, is_sound in ((SOUND, True), (MISTAKES, False)):
        for words, make in table.items():
            if arguments.only not in words:
                continue
            one = make()
            result = diagnosed(one)
            found = first(result)
            right[is_sound] += found is None if one.named is None else one.named in (found or "")
            findings = () if isinstance(result, Exception) else result.findings[:1]
            evidence = findings[0].evidence[0] if found and findings else ""
            lines.append(f"| {words} | {named(result, one.named)} | {evidence} |")
            print(lines[-1], flush=True)
    summary = (
        f"{right[True]} of {len(SOUND)} sound setups without a finding of weight; {right[False]} of {len(MISTAKES)} "
        "mistakes named first, where a refusal that names the mistake counts."
    )
    print(summary)
    if arguments.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        text = "\n".join([before + BEGIN, "", summary, "", *lines, "", END]) + rest.split(END)[1]
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
