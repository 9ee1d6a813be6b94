"""Results as text for a terminal."""

import re
import sys
import unicodedata

import pytest

from robust_ext.core import tabular
from robust_ext.core.tabular import WIDTH
from robust_ext.reports import report_text
from tests.reports.mead_results import arms_of, make, small_result
from tests.reports.results import every_float, make_adaptive, make_attack, make_result, make_robust_accuracy, shown


def columns_of(text):
    """Terminal columns, counted in another way than the code does: by normalising to composed characters."""
    composed = unicodedata.normalize("NFC", text)
    return sum(1 + (unicodedata.east_asian_width(char) in {"W", "F"}) for char in composed)


def test_cells_of_attacks():
    """Targets are in the rows when they differ, and missing values are dashes."""
    nothing = dict.fromkeys(("score", "score_interval", "random_score", "random_score_interval"))
    attack = make_attack("pgd", **nothing, verdict="inconclusive", samples=0, canaries={"planted": 0, "repaired": 0})
    rows = report_text(make_result([attack, make_attack("pgd", target="two")])).splitlines()[2:4]
    assert rows[0].split() == ["pgd", "inconclusive", "-", "-", "-", "0", "-", "87.0"]
    assert rows[1].startswith("pgd on two ")


LONG = (
    "pgd of the appendix with two restarts and a random start",
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
    rows = lines[2 : lines.index("")]
    assert sum(row.endswith("87.0") for row in rows) == number, "the numbers are all there, once an attack"
    assert len(rows) <= 4 * number


@pytest.mark.parametrize("name", LONG)
def test_other_kinds_are_never_too_wide(name):
    mead = make(arms_of("linf 0.125", "Spatial"), [name, "nss"], samples=40, white_box=[name], published=True)
    for result in ({**mead, "suite": name}, make_robust_accuracy(name, "ddn"), make_adaptive(name, "Square")):
        assert max(map(columns_of, report_text(result).splitlines())) <= WIDTH


def test_no_name_is_cut_that_has_room(monkeypatch):
    """It goes on below where the terminal is narrow, and stands in its row where it is wide."""
    (name, *_), result = LONG, make_result([make_attack(LONG[0], verdict="inconclusive")])
    head = report_text(result).split("\n\n")[0]
    assert " ".join(line[: head.index("verdict")].strip() for line in head.splitlines()[2:]) == name
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "180")
    assert tabular.room() == 180
    assert report_text(result).splitlines()[2].startswith(f"{name} ")


def test_wrapping_loses_no_word():
    reason = " ".join(f"word{number}" for number in range(60))
    lines = report_text(make_result([make_attack("pgd", reason=reason)], warnings=[])).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("pgd: "))
    assert " ".join(line.strip() for line in lines[start : lines.index("", start)]) == f"pgd: {reason}"


def test_control_characters_do_not_reach_the_terminal():
    text = report_text(make_result([make_attack("a\x1b[31mb\r\nc\u202e\ud800", reason="two\nlines")]))
    assert "\x1b" not in text
    assert r"a\x1b[31mb c\u202e\ud800: two lines" in text
    text.encode("utf-8")


def average(result, detector, norm, objective):
    key = (detector["name"], norm, objective)
    (found,) = [one for one in result["averages"] if (one["detector"], one["norm"], one["objective"]) == key]
    return found


def block(text, title):
    """The lines of a part, from the one that starts with ``title`` to the next empty one."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    return lines[start : lines.index("", start)]


def test_numbers_of_mead_stand_where_they_belong(large):
    """The summary's rows are the means given, averages stand under their objectives, and no other number is shown."""
    text = report_text(large)
    for row, detector in zip(block(text, "detector ")[2:], large["detectors"], strict=True):
        mean = average(large, detector, "all", None)
        blind = [one for one in detector["results"] if one["objective"] is None and one["algorithm"] is None]
        lowest = min((one for one in blind if one["positives"] >= 20), key=lambda one: one["auroc"])
        known = [one for one in detector["white_box"] if one["scenario"] == "all"]
        worst = min(known, key=lambda one: one["auroc"], default=None)
        expected = [detector["name"], *(shown(mean[key]) for key in ("auroc", "fpr_at_95_tpr", "tpr_at_5_fpr"))]
        expected += ["-" if row is None else f"{shown(row['auroc'])} {row['group']}" for row in (lowest, worst)]
        assert re.split(r"  +", row) == expected
        _, objectives, numbers, _, *rows = block(text, f"{detector['name']}: averages by norm")
        assert objectives.split()[::2] == ["MEAD", "ACE", "KL", "Gini", "FR"]
        assert numbers.split() == ["AUROC", "FPR95"] * 5
        norms = {**{f"{norm} average": norm for norm in ("l1", "l2", "linf")}, "no norm": None, "mean of these": "all"}
        for line, (title, norm) in zip(rows, norms.items(), strict=True):
            means = [average(large, detector, norm, one) for one in (None, "ace", "kl", "gini", "fisher-rao")]
            assert line.startswith(title)
            assert line[len(title) :].split() == [
                shown(mean[key]) for mean in means for key in ("auroc", "fpr_at_95_tpr")
            ]
    body = text[text.index("detector ") : text.index("Fewer than")]
    found = set(re.findall(r"(?<![\w.])\d+\.\d(?!\d)", body))
    # A group's name may hold an epsilon of one decimal.
    epsilons = {f"{arm['epsilon']:g}" for arm in large["arms"] if arm["epsilon"] is not None}
    assert len(found) > 200
    assert found <= {*map(shown, every_float(large)), *epsilons}
    assert re.search(r"Fewer than 20 positives, .*: l1 5 \(", text)
    assert re.search(r"nss: Scores .* left out in 1 row, up to 3 in one\.", " ".join(text.split()))
    assert "Fewer" not in report_text(make(arms_of("linf 0.5"), ["nss"], samples=90))


def test_rows_without_positives_and_with_one_arm_have_dashes():
    text = report_text(make(arms_of("l1 5", "Spatial"), ["nss"], samples=30, rates={"l1 5": 0, "Spatial": 0}))
    assert re.search(r"^nss +- +- +- +-$", text, flags=re.MULTILINE)
    assert re.search(r"^l1 5 +0 +0\.0 +- +- +- +-$", text, flags=re.MULTILINE)
    assert re.search(r"^l1 average( +-){10}$", text, flags=re.MULTILINE)
    row = block(report_text(make(arms_of("Spatial"), ["nss"], samples=50)), "group")[2]
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
