"""What the examples of docs/causes come to, each as it fails and as it is fixed.

    python benchmarks/my_attack_failed.py [--only WORDS] [--write]

``--write`` puts findings and numbers into the pages, and makes the table of contents of docs/my_attack_failed.md. The
examples are the pages' own, see tests/evaluations/diagnosis/test_my_attack_failed.py.
"""

from __future__ import annotations

import re
import sys
import textwrap
import time
from pathlib import Path

from common import page_options

sys.path.insert(0, str(Path(__file__).parents[1]))
from robust_ext.evaluations.causes.finding import CODES
from tests.evaluations.diagnosis.test_my_attack_failed import PAGE, PAGES, RUN, SECTIONS, change, run, shown

BEGIN, END = "<!-- begin: contents -->\n", "<!-- end: contents -->"


def written(page: str, title: str, printed: str, changed: str) -> str:
    """The page with what an example came to."""
    before, heading, rest = page.partition(f"\n## {f'`{title}`' if title in CODES else title}\n")
    here, after = re.split(r"(?=^##)|\Z", rest, maxsplit=1, flags=re.MULTILINE)
    filled = textwrap.fill(printed, 108, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    block = f"```text\n{filled}\n```"
    here = re.sub(r"```text\n.*?```", lambda _: block, here, count=1, flags=re.DOTALL)
    here = re.sub(
        r"^\*\*Before and after\.\*\*.*$", lambda _: f"**Before and after.** {changed}", here, flags=re.MULTILINE
    )
    return before + heading + here + after


def contents() -> str:
    """The table of contents: each finding as it is printed, and its section."""
    lines = ["| | printed | section |", "|---|---|---|"]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        for heading, printed in re.findall(r"^## ([^\n]+)\n+```text\n(.*?)```", text, re.DOTALL | re.MULTILINE):
            link = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            lines.append(f"| {title} | {' '.join(printed.split())} | [{heading}](causes/{page.name}#{link}) |")
            title = ""
    return "\n".join(lines)


def main() -> None:
    """Run all and print what they came to."""
    arguments = page_options(__doc__, runs="examples")
    for title in RUN:
        if not re.search(arguments.only, title):
            continue
        begun = time.perf_counter()
        before, after = run(title, "+"), run(title, "-")
        changed, codes = change(before, after), [[one.code for one in result.findings] for result in (before, after)]
        print(f"{title}: {codes[0]}, fixed {codes[1]}. {changed} ({time.perf_counter() - begun:.1f} s)", flush=True)
        if arguments.write:
            (page,) = (page for page in PAGES if SECTIONS[title] in page.read_text(encoding="utf-8"))
            text = written(page.read_text(encoding="utf-8"), title, shown(before, title), changed)
            page.write_text(text, encoding="utf-8")
    if arguments.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{contents()}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
