"""Bad inputs end in an error of the project's own: a few of those that ``python -m tests.fuzz`` tries."""

import pytest

from tests.fuzz.__main__ import run


def check(cases, seed, categories, *, processes=0):
    table, broken, accepted = run(cases, seed=seed, processes=processes)
    assert not broken, "\n".join(broken)
    assert set(table) >= categories
    assert sum(counts["refused"] for counts in table.values()) > 0.8 * cases
    assert all(text.split(": ", 1)[1] for text in accepted)


CATEGORIES = {"numbers", "texts", "budgets", "commands", "code", "files", "attacks", "data files", "arrays", "suites"}


def test_some_bad_inputs():
    check(120, 11, CATEGORIES)


@pytest.mark.exhaustive
def test_ten_thousand_bad_inputs():
    check(10_000, 0, {*CATEGORIES, "weights", "API mead"}, processes=100)
