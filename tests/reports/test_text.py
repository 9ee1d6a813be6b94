"""Results as text for a terminal."""

import re
import unicodedata

import pytest

from robust_ext.core.tabular import WIDTH
from robust_ext.core.wording import count, percent, plain, share, shorten
from robust_ext.reports import report_text
from robust_ext.reports.mead_detector import colour
from robust_ext.reports.mead_rows import norm_title, short_arm
from tests.reports.mead_results import arms_of, make, small_result
from tests.reports.results import every_float, make_adaptive, make_attack, make_result, make_robust_accuracy, shown


def columns_of(text):
    """Terminal columns, counted in another way than the code does: by normalising to composed characters."""
    composed = unicodedata.normalize("NFC", text)
    return sum(1 + (unicodedata.east_asian_width(char) in {"W", "F"}) for char in composed)


def test_targets_are_in_the_rows_when_they_differ():
    result = make_result([make_attack("pgd", target="one"), make_attack("pgd", target="two")])
    _, _, first, second, *_ = report_text(result).splitlines()
    assert "pgd on one" in first
    assert "pgd on two" in second


def test_missing_values_are_dashes():
    nothing = dict.fromkeys(("score", "score_interval", "random_score", "random_score_interval"))
    attack = make_attack("pgd", **nothing, verdict="inconclusive", samples=0, canaries={"planted": 0, "repaired": 0})
    row = report_text(make_result([attack])).splitlines()[2]
    assert row.split() == ["pgd", "inconclusive", "-", "-", "-", "0", "-", "87.0"]


LONG = (
    "foolbox:LinfPGD(steps=100, rel_stepsize=0.05, abs_stepsize=None, random_start=True)",
    "x" * 400,
    "攻撃" * 60,
    "é" * 150,
    "ロング name " * 30,
)


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("number", [1, 8])
def test_is_never_too_wide(name, number):
    attacks = [make_attack(name, reason="Weil " + name * 2, verdict="inconclusive") for _ in range(number)]
    lines = report_text(make_result(attacks, reason=name * 3)).splitlines()
    assert max(map(columns_of, lines)) <= WIDTH
    rows = lines[2 : 2 + number]
    assert all("…" in row for row in rows)
    assert all(row.endswith("87.0") for row in rows)
    assert {columns_of(row) for row in rows} == {columns_of(lines[1])}


@pytest.mark.parametrize("name", LONG)
def test_other_kinds_are_never_too_wide(name):
    mead = make(arms_of("linf 0.125", "Spatial"), [name, "nss"], samples=40, white_box=[name], published=True)
    for result in ({**mead, "suite": name}, make_robust_accuracy(name, "ddn"), make_adaptive(name, "Square")):
        assert max(map(columns_of, report_text(result).splitlines())) <= WIDTH
    assert "…" in report_text(mead)


def test_wrapping_loses_no_word():
    reason = " ".join(f"word{number}" for number in range(60))
    lines = report_text(make_result([make_attack("pgd", reason=reason)], warnings=[])).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("pgd: "))
    paragraph = " ".join(line.strip() for line in lines[start : lines.index("", start)])
    assert paragraph == f"pgd: {reason}"


def test_is_the_same_in_a_notebook(monkeypatch):
    text = report_text(make_result([make_attack("pgd")]))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert report_text(make_result([make_attack("pgd")])) == text
    assert "pgd" in text


def test_control_characters_do_not_reach_the_terminal():
    text = report_text(make_result([make_attack("a\x1b[31mb\r\nc\u202e\ud800", reason="two\nlines")]))
    assert "\x1b" not in text
    assert r"a\x1b[31mb c\u202e\ud800: two lines" in text
    text.encode("utf-8")


WORDS = [
    # Rounding never crosses the threshold.
    (share, (0.95, 0.95), "0.950"),
    (share, (0.9499, 0.95), "0.9499"),
    (share, (0.94981234567, 0.95), "0.9498"),
    (share, (1.0, 0.95), "1.000"),
    (share, (0.0, 0.95), "0.000"),
    (share, (None, 0.95), "-"),
    (percent, (0.9071,), "90.7"),
    (percent, (1.0,), "100.0"),
    # Both ends are kept.
    (shorten, ("abcdefghij", 10), "abcdefghij"),
    (shorten, ("abcdefghij", 7), "abc…hij"),
    (shorten, ("攻撃攻撃", 5), "攻…撃"),
    (shorten, ("foolbox:LinfPGD(steps=40)", 15), "foolbox…eps=40)"),
    (plain, ("naïve 攻撃 😀 <b> $x$",), "naïve 攻撃 😀 <b> $x$"),
    (plain, ("a\tb \x1b[31m",), r"a b \x1b[31m"),
    (count, (1, "attack"), "1 attack"),
    (count, (2, "attack"), "2 attacks"),
    (norm_title, ("l2",), "l2 average"),
    (norm_title, (None,), "no norm"),
    (norm_title, ("all",), "mean of these"),
    (short_arm, ("PGD-ACE linf 0.25", "linf 0.25"), "PGD-ACE"),
    (short_arm, ("DeepFool", "DeepFool"), "DeepFool"),
    (short_arm, ("PGD-ACE linf 0.25, knowing lid", "linf 0.25", "lid"), "PGD-ACE"),
    (colour, (0.0,), "color-mix(in srgb, var(--low) 100%, var(--middle))"),
    (colour, (0.5,), "color-mix(in srgb, var(--high) 0%, var(--middle))"),
    (colour, (0.875,), "color-mix(in srgb, var(--high) 75%, var(--middle))"),
]


@pytest.mark.parametrize(("word", "given", "shown"), WORDS)
def test_words(word, given, shown):
    assert word(*given) == shown


def average(result, detector, norm, objective):
    key = (detector["name"], norm, objective)
    (found,) = [one for one in result["averages"] if (one["detector"], one["norm"], one["objective"]) == key]
    return found


def block(text, title):
    """The lines of a part, from the one that starts with ``title`` to the next empty one."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    return lines[start : lines.index("", start)]


def test_summary_rows_are_the_means_given(large):
    header, rule, *rows = block(report_text(large), "detector ")
    assert header.split()[:4] == ["detector", "AUROC", "FPR95", "TPR5"]
    assert set(rule) == {"-"}
    assert len(rows) == len(large["detectors"])
    for row, detector in zip(rows, large["detectors"], strict=True):
        mean = average(large, detector, "all", None)
        blind = [one for one in detector["results"] if one["objective"] is None and one["algorithm"] is None]
        lowest = min((one for one in blind if one["positives"] >= 20), key=lambda one: one["auroc"])
        known = [one for one in detector["white_box"] if one["scenario"] == "all"]
        worst = min(known, key=lambda one: one["auroc"], default=None)
        expected = [detector["name"], *(shown(mean[key]) for key in ("auroc", "fpr_at_95_tpr", "tpr_at_5_fpr"))]
        expected += ["-" if row is None else f"{shown(row['auroc'])} {row['group']}" for row in (lowest, worst)]
        assert re.split(r"  +", row) == expected


def test_averages_stand_under_their_objectives(large):
    text = report_text(large)
    for detector in large["detectors"]:
        _, objectives, numbers, _, *rows = block(text, f"{detector['name']}: averages by norm")
        assert objectives.split()[::2] == ["MEAD", "ACE", "KL", "Gini", "FR"]
        assert numbers.split() == ["AUROC", "FPR95"] * 5
        norms = {**{f"{norm} average": norm for norm in ("l1", "l2", "linf")}, "no norm": None, "mean of these": "all"}
        for row, (title, norm) in zip(rows, norms.items(), strict=True):
            expected = []
            for objective in (None, "ace", "kl", "gini", "fisher-rao"):
                mean = average(large, detector, norm, objective)
                expected += [shown(mean["auroc"]), shown(mean["fpr_at_95_tpr"])]
            assert row.startswith(title)
            assert row[len(title) :].split() == expected


def test_every_number_is_one_of_the_result(large):
    text = report_text(large)
    body = text[text.index("detector ") : text.index("Fewer than")]
    found = set(re.findall(r"(?<![\w.])\d+\.\d(?!\d)", body))
    # A group's name may hold an epsilon of one decimal.
    epsilons = {f"{arm['epsilon']:g}" for arm in large["arms"] if arm["epsilon"] is not None}
    assert len(found) > 200
    assert found <= {*map(shown, every_float(large)), *epsilons}


def test_notes_say_what_is_rough_and_left_out(large):
    text = " ".join(report_text(large).split())
    assert "Fewer than 20 positives, so numbers are rough or missing: l1 5 (" in text
    assert "l1 10 (0)." in text
    assert "nss: Scores that are no numbers (NaN) were left out in 1 row, up to 3 in one." in text
    assert "Rows without a number are not part of the averages: l1 average, 1 of 7." in text
    clean = report_text(make(arms_of("linf 0.5"), ["nss"], samples=90))
    assert not re.search("Fewer|NaN|Rows without", clean)
    assert "white-box" not in clean


def test_rows_without_positives_have_dashes():
    text = report_text(make(arms_of("l1 5", "Spatial"), ["nss"], samples=30, rates={"l1 5": 0, "Spatial": 0}))
    assert re.search(r"^nss +- +- +- +-$", text, flags=re.MULTILINE)
    assert re.search(r"^l1 5 +0 +0\.0 +- +- +- +-$", text, flags=re.MULTILINE)
    assert re.search(r"^l1 average( +-){10}$", text, flags=re.MULTILINE)


def test_one_detector_and_one_arm():
    text = report_text(make(arms_of("Spatial"), ["nss"], samples=50))
    assert "1 arm in 1 group;" in text
    assert block(text, "nss: averages")[1].split() == ["MEAD", "MEAD"]
    row = next(line for line in text.splitlines() if line.startswith("Spatial"))
    assert row.endswith("-"), "an only arm has all of the attribution"


def test_more_objectives_than_fit_go_on_below():
    result = small_result()
    more = [f"objective-{number}" for number in range(9)]
    aces = [row for row in result["averages"] if row["objective"] == "ace"]
    extra = [{**row, "objective": name, "auroc": 0.123 + n / 100} for row in aces for n, name in enumerate(more)]
    text = report_text({**result, "averages": result["averages"] + extra})
    for number, name in enumerate(more):
        assert name in text
        assert shown(0.123 + number / 100) in text
    assert max(map(columns_of, text.splitlines())) <= WIDTH
