"""The table of a result for a terminal."""

from __future__ import annotations

import unicodedata

import pytest

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.reports import table
from robust_ext.reports.table import WIDTH
from robust_ext.reports.wording import plain, share, shorten


def columns_of(text):
    """Terminal columns, counted in another way than the code does: by normalising to composed characters."""
    composed = unicodedata.normalize("NFC", text)
    return sum(1 + (unicodedata.east_asian_width(char) in {"W", "F"}) for char in composed)


def test_says_what_the_result_says(make_attack, make_result):
    text = table(make_result([make_attack("pgd", target="a resnet")]))
    header, rule, row, *rest = text.splitlines()
    assert header.split() == ["verdict", "attack", "test", "score", "R-ASR", "planted", "canaries", "seconds"]
    assert set(rule) == {"-"}
    assert row.split() == [
        *("failed", "pgd", "0.613", "[0.55,", "0.67]", "0.121", "[0.08,", "0.17]"),
        *("256", "9", "of", "37", "87.0"),
    ]
    assert "pgd on a resnet: 157 of 256 planted problems were solved." in rest
    assert rest[-1] == "Verdict: FAILED. Planted adversarial examples were missed."


def test_targets_are_in_the_rows_when_they_differ(make_attack, make_result):
    rows = table(make_result([make_attack("pgd", target="one"), make_attack("pgd", target="two")])).splitlines()[2:4]
    assert "pgd on one" in rows[0]
    assert "pgd on two" in rows[1]


def test_missing_values_are_dashes(make_attack, make_result):
    nothing = dict.fromkeys(("score", "score_interval", "random_score", "random_score_interval"))
    attack = make_attack("pgd", **nothing, verdict="inconclusive", samples=0, canaries={"planted": 0, "repaired": 0})
    row = table(make_result([attack])).splitlines()[2]
    assert row.split() == ["inconclusive", "pgd", "-", "-", "0", "-", "87.0"]


@pytest.mark.parametrize(
    "name",
    [
        "foolbox:LinfPGD(steps=100, rel_stepsize=0.05, abs_stepsize=None, random_start=True)",
        "x" * 400,
        "攻撃" * 60,
        "é" * 150,
        "ロング name " * 30,
    ],
)
@pytest.mark.parametrize("count", [1, 8])
def test_is_never_too_wide(make_attack, make_result, name, count):
    attacks = [make_attack(name, reason="Weil " + name * 2, verdict="inconclusive") for _ in range(count)]
    lines = table(make_result(attacks, reason=name * 3)).splitlines()
    assert max(map(columns_of, lines)) <= WIDTH
    rows = lines[2 : 2 + count]
    assert all("…" in row for row in rows)
    assert all(row.endswith("87.0") for row in rows)
    assert {columns_of(row) for row in rows} == {columns_of(lines[1])}


def test_wrapping_loses_no_word(make_attack, make_result):
    reason = " ".join(f"word{number}" for number in range(60))
    lines = table(make_result([make_attack("pgd", reason=reason)])).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("pgd: "))
    paragraph = " ".join(line.strip() for line in lines[start : lines.index("", start)])
    assert paragraph == f"pgd: {reason}"


def test_control_characters_do_not_reach_the_terminal(make_attack, make_result):
    text = table(make_result([make_attack("a\x1b[31mb\r\nc\u202e\ud800", reason="two\nlines")]))
    assert "\x1b" not in text
    assert r"a\x1b[31mb c\u202e\ud800: two lines" in text
    text.encode("utf-8")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attacks": []}, "at least one attack"),
        ({"attacks": None}, "at least one attack"),
        ({"kind": "mead"}, "got mead, expected 'binarization'"),
        ({"verdict": "great"}, "got great, expected one of 'passed'"),
    ],
)
def test_refuses_what_it_cannot_show(make_attack, make_result, changes, named):
    with pytest.raises(InvalidArgumentError, match=named):
        table({**make_result([make_attack("pgd")]), **changes})


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.95, "0.950"), (0.9499, "0.9499"), (0.94981234567, "0.9498"), (1.0, "1.000"), (0.0, "0.000"), (None, "-")],
)
def test_rounding_never_crosses_the_threshold(value, shown):
    assert share(value, 0.95) == shown


def test_shorten_keeps_both_ends():
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghij", 7) == "abc…hij"
    assert shorten("攻撃攻撃", 5) == "攻…撃"


def test_plain_keeps_what_can_be_printed():
    assert plain("naïve 攻撃 😀 <b> $x$") == "naïve 攻撃 😀 <b> $x$"
