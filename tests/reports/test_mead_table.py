"""A MEAD result as text."""

from __future__ import annotations

import re
import unicodedata

import pytest

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.reports.mead_table import mead_table
from robust_ext.reports.table import WIDTH
from tests.reports.mead_results import large_result, make, small_result, suite


@pytest.fixture(scope="module")
def large():
    return large_result(3)


def columns_of(text):
    """Terminal columns, counted in another way than the code does: by normalising to composed characters."""
    composed = unicodedata.normalize("NFC", text)
    return sum(1 + (unicodedata.east_asian_width(char) in {"W", "F"}) for char in composed)


def shown(value):
    return "-" if value is None else f"{value * 100:.1f}"


def numbers_of(value):
    """Every number anywhere in a result, as the table writes shares."""
    if isinstance(value, dict):
        return set().union(*map(numbers_of, value.values()), set())
    if isinstance(value, list):
        return set().union(*map(numbers_of, value), set())
    return {shown(value)} if isinstance(value, float) else set()


def block(text, title):
    """The lines of a part, from the one that starts with ``title`` to the next empty one."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    return lines[start : lines.index("", start)]


def test_summary_rows_are_the_means_given(large):
    header, rule, *rows = block(mead_table(large), "detector ")
    assert header.split()[:4] == ["detector", "AUROC", "FPR95", "TPR5"]
    assert set(rule) == {"-"}
    assert len(rows) == len(large["detectors"])
    for row, detector in zip(rows, large["detectors"], strict=True):
        (mean,) = [
            one
            for one in large["averages"]
            if (one["detector"], one["norm"], one["objective"]) == (detector["name"], "all", None)
        ]
        blind = [one for one in detector["results"] if one["objective"] is None and one["algorithm"] is None]
        lowest = min((one for one in blind if one["positives"] >= 20), key=lambda one: one["auroc"])
        known = [one for one in detector["white_box"] if one["scenario"] == "all"]
        worst = min(known, key=lambda one: one["auroc"], default=None)
        expected = [detector["name"], *(shown(mean[key]) for key in ("auroc", "fpr_at_95_tpr", "tpr_at_5_fpr"))]
        expected += [shown(lowest["auroc"]), lowest["group"]]
        expected += ["-", "-"] if worst is None else [shown(worst["auroc"]), worst["group"]]
        assert re.split(r"  +", row) == expected


def test_averages_stand_under_their_objectives(large):
    text = mead_table(large, groups=False)
    for detector in large["detectors"]:
        _, objectives, numbers, _, *rows = block(text, f"{detector['name']}: averages by norm")
        assert objectives.split() == ["MEAD", "ACE", "KL", "Gini", "FR"]
        assert numbers.split() == ["AUROC", "FPR95"] * 5
        norms = {
            "l1 average": "l1",
            "l2 average": "l2",
            "linf average": "linf",
            "no norm": None,
            "mean of these": "all",
        }
        for row, (title, norm) in zip(rows, norms.items(), strict=True):
            expected = []
            for objective in (None, "ace", "kl", "gini", "fisher-rao"):
                (mean,) = [
                    one
                    for one in large["averages"]
                    if (one["detector"], one["norm"], one["objective"]) == (detector["name"], norm, objective)
                ]
                expected += [shown(mean["auroc"]), shown(mean["fpr_at_95_tpr"])]
            assert row.startswith(title)
            assert row[len(title) :].split() == expected


def test_group_rows_say_what_the_entries_say():
    result = small_result()
    text = mead_table(result)
    (lid,) = [one for one in result["detectors"] if one["name"] == "lid"]
    rows = text[text.index("lid: averages") :].splitlines()
    start = next(number for number, line in enumerate(rows) if line.startswith("group"))
    rows = rows[start + 2 :]
    (entry,) = [
        one
        for one in lid["results"]
        if (one["group"], one["objective"], one["algorithm"]) == ("linf 0.125", None, None)
    ]
    singles = {
        one["objective"]: one["auroc"]
        for one in lid["results"]
        if one["group"] == "linf 0.125" and one["objective"] is not None
    }
    lowest = min(singles, key=singles.get)
    blamed = max(entry["blame"], key=entry["blame"].get)
    place = next(number for number, row in enumerate(rows) if row.startswith("linf 0.125"))
    low, high = entry["auroc_interval"]
    assert re.split(r"  +", rows[place]) == [
        "linf 0.125",
        str(entry["positives"]),
        shown(entry["coverage"]),
        f"{shown(entry['auroc'])} [{shown(low)}, {shown(high)}]",
        shown(entry["fpr_at_95_tpr"]),
        f"{ {'ace': 'ACE', 'kl': 'KL', 'gini': 'Gini', 'fisher-rao': 'FR'}[lowest] } {shown(singles[lowest])}",
        f"{shown(entry['blame'][blamed])} {blamed.removesuffix(' linf 0.125')}",
    ]
    for offset, scenario, words in [(1, "white-box", "white-box"), (2, "all", "blind and white-box")]:
        (entry,) = [one for one in lid["white_box"] if (one["group"], one["scenario"]) == ("linf 0.125", scenario)]
        cells = re.split(r"  +", rows[place + offset].strip())
        assert cells[:3] == [words, str(entry["positives"]), shown(entry["coverage"])]
        assert cells[3].startswith(shown(entry["auroc"]))


def test_every_number_is_one_of_the_result(large):
    text = mead_table(large)
    body = text[text.index("detector ") : text.index("Fewer than")]
    found = set(re.findall(r"(?<![\w.])\d+\.\d(?!\d)", body))
    # A group's name may hold an epsilon of one decimal.
    epsilons = {f"{arm['epsilon']:g}" for arm in large["arms"] if arm["epsilon"] is not None}
    assert len(found) > 200
    assert found <= numbers_of(large) | epsilons


def test_groups_can_be_left_out(large):
    text = mead_table(large, groups=False)
    assert "coverage" not in text
    assert "most blame" not in text
    assert block(text, "detector ") == block(mead_table(large), "detector ")


def test_notes_say_what_is_rough_and_left_out(large):
    text = " ".join(mead_table(large).split())
    assert "Fewer than 20 positives, so numbers are rough or missing: l1 5 (" in text
    assert "l1 10 (0)." in text
    assert "nss: Scores that are no numbers (NaN) were left out in 1 row, up to 3 in one." in text
    assert "Rows without a number are not part of the averages: l1 average, 1 of 7." in text
    clean = mead_table(make([arm for arm in suite() if arm.group == "linf 0.5"], ["nss"], samples=90))
    assert not re.search("Fewer|NaN|Rows without", clean)
    assert "white-box" not in clean


def test_rows_without_positives_have_dashes():
    arms = [arm for arm in suite() if arm.group in ("l1 5", "Spatial")]
    text = mead_table(make(arms, ["nss"], samples=30, rates={"l1 5": 0, "Spatial": 0}))
    assert re.search(r"^nss +- +- +- +- +-$", text, flags=re.MULTILINE)
    assert re.search(r"^l1 5 +0 +0\.0 +- +- +- +-$", text, flags=re.MULTILINE)
    assert re.search(r"^l1 average( +-){10}$", text, flags=re.MULTILINE)


def test_one_detector_and_one_arm():
    text = mead_table(make([arm for arm in suite() if arm.group == "Spatial"], ["nss"], samples=50))
    assert "1 arm in 1 group;" in text
    assert block(text, "nss: averages")[1].split() == ["MEAD"]
    row = next(line for line in text.splitlines() if line.startswith("Spatial"))
    assert row.endswith("-"), "an only arm has all of the blame"


def test_numbers_of_the_public_code_are_beside_ours():
    arms = [arm for arm in suite() if arm.group == "linf 0.5"]
    result = make(arms, ["nss"], samples=50, published=True)
    entry = result["detectors"][0]["results"][0]
    text = mead_table(result)
    assert "published" in text
    assert f"{shown(entry['published']['auroc'])} / 87.5" in text
    assert "published" not in mead_table(make(arms, ["nss"], samples=50))


def test_more_objectives_than_fit_go_on_below():
    result = small_result()
    more = [f"objective-{number}" for number in range(9)]
    extra = [
        {**row, "objective": name, "auroc": 0.123 + number / 100}
        for row in result["averages"]
        if row["objective"] == "ace"
        for number, name in enumerate(more)
    ]
    text = mead_table({**result, "averages": result["averages"] + extra})
    for number, name in enumerate(more):
        assert name in text
        assert shown(0.123 + number / 100) in text
    assert max(map(columns_of, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("name", ["x" * 300, "攻撃" * 80, "é" * 200, "a\tlong name " * 20])
def test_is_never_too_wide(name):
    arms = [arm for arm in suite() if arm.group in ("linf 0.125", "Spatial")]
    result = make(arms, [name, "nss"], samples=40, white_box=[name], published=True)
    text = mead_table({**result, "suite": name})
    assert max(map(columns_of, text.splitlines())) <= WIDTH
    assert "…" in text


def test_control_characters_do_not_reach_the_terminal():
    nasty = "a\x1b[31mb\r\nc\u202e\ud800"
    arms = [arm for arm in suite() if arm.group == "linf 0.125"]
    result = make(arms, [nasty], samples=40, white_box=[nasty])
    text = mead_table({**result, "suite": nasty})
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"suite a\x1b[31mb c\u202e\ud800:" in text
    text.encode("utf-8")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"detectors": []}, "at least one detector"),
        ({"detectors": None}, "at least one detector"),
        ({"kind": "binarization"}, "got binarization, expected 'mead'"),
    ],
)
def test_refuses_what_it_cannot_show(changes, named):
    with pytest.raises(InvalidArgumentError, match=named):
        mead_table(small_result(**changes))
