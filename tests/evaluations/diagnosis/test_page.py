"""docs/diagnosis.md has every code with its weight, in order, and every key of a trace."""

import re
from pathlib import Path

from robust_ext.engine.trace import COLUMNS
from robust_ext.evaluations.causes.finding import CODES

PAGE = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text(encoding="utf-8")


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_codes_stand_in_order_with_their_weights():
    rows = re.findall(r"^\| \[`(\w+)`\]\(my_attack_failed\.md#\1\) \| (\w+) \|", section("What is found"), re.MULTILINE)
    assert rows == list(CODES.items())


def test_the_table_of_others_names_codes_only():
    named = set(re.findall(r"`(\w+_\w+)`", section("Who else looks at what")))
    assert named - {"loss_gradient_check", "ind_1", "ind_2", "ind_3", "ind_4"} <= set(CODES)


def test_keys_of_a_trace_are_documented():
    first_columns = [line.split("|")[1] for line in section("The trace").splitlines() if line.startswith("| `")]
    assert {key for cell in first_columns for key in re.findall(r"`(\w+)`", cell)} == set(COLUMNS)
