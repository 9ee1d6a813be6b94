"""Results as text for a terminal, findings in words, numbers as they were typed, and short names of attacks."""

import sys
import unicodedata
from fractions import Fraction
from math import inf, nextafter

import pytest

from robust_ext.core import tabular
from robust_ext.core.finding_texts import leading, lines, sentence, shared, subject
from robust_ext.core.tabular import WIDTH
from robust_ext.core.wording import retyped, short_names, typed
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.reports import report_page, report_text
from tests.reports import results as made
from tests.reports.pages import Page


def columns_of(text):
    """Terminal columns, counted in another way than the code does: by normalising to composed characters."""
    composed = unicodedata.normalize("NFC", text)
    return sum(1 + (unicodedata.east_asian_width(char) in {"W", "F"}) for char in composed)


LONG = ("pgd of the appendix with two restarts and a random start", "x" * 400, "攻撃" * 60, "é" * 150)
LONG += ("ロング name " * 30,)


@pytest.mark.parametrize("name", LONG)
def test_is_never_too_wide(name):
    for number in (1, 8):
        attacks = [made.make_attack(name, reason="Weil " + name * 2, verdict="inconclusive") for _ in range(number)]
        rows = report_text(made.make_result(attacks, reason=name * 3)).splitlines()
        assert max(map(columns_of, rows)) <= WIDTH
        rows = rows[2 : rows.index("")]
        assert sum(row.endswith("87.0") for row in rows) == number, "the numbers are all there, once an attack"
        assert len(rows) <= 4 * number
    mead = made.make_mead(
        made.arms_of("linf 0.125", "Spatial"), [name, "nss"], samples=40, white_box=[name], published=True
    )
    for result in ({**mead, "suite": name}, made.make_robust_accuracy(name, "ddn"), made.make_adaptive(name, "Square")):
        assert max(map(columns_of, report_text(result).splitlines())) <= WIDTH


def test_no_word_is_lost(monkeypatch):
    """Names and reasons go on below where the terminal is narrow, and stand in their row where it is wide."""
    reason = " ".join(f"word{number}" for number in range(60))
    rows = report_text(made.make_result([made.make_attack("pgd", reason=reason)], warnings=[])).splitlines()
    start = next(number for number, line in enumerate(rows) if line.startswith("pgd: "))
    assert " ".join(line.strip() for line in rows[start : rows.index("", start)]) == f"pgd: {reason}"
    result = made.make_result([made.make_attack(LONG[0], verdict="inconclusive")])
    head = report_text(result).split("\n\n")[0]
    assert " ".join(line[: head.index("verdict")].strip() for line in head.splitlines()[2:]) == LONG[0]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "180")
    assert tabular.room() == 180
    assert report_text(result).splitlines()[2].startswith(f"{LONG[0]} ")


def plain(**values):
    return Finding(**{"code": "unmoved", "cause": "It stays.", **values}).to_dict()


def test_what_leads_and_who_shares_it():
    """The first of weight of each attack, and all about the model; attacks with one cause in one sentence."""
    zero = {"code": "zero_gradient", "layer": "0"}
    found = [plain(**zero), *(plain(**zero, attack=name, cause=f"As of {name}.") for name in "abcd")]
    found += [plain(code="flat_loss", attack="a"), plain(code="flat_loss", attack="e")]
    found += [plain(code="no_gradient", attack="f")]
    assert [one["attack"] for one in leading(found)] == [None, "a", "b", "c", "d", "e"]
    groups = [(subject(names), finding["cause"]) for finding, names in shared(leading(found))]
    assert groups == [("a, b, c and 1 more", "As of a."), ("e", "It stays.")]
    assert shared(found[:1]) == [(found[0], [])]
    # A sentence has the first evidence, and names nothing twice.
    assert sentence(plain(samples=3, of=4, evidence=("In 3 of 4 samples", "More."))) == "It stays. In 3 of 4 samples."
    assert sentence(plain(layer="net.0", samples=0, of=4)) == "It stays (0 of 4 samples, layer net.0)."


def test_lines_to_paste_are_whole_and_those_for_the_inside_of_an_attack_are_comments():
    paste, code = f"--attack {'long' * 60}", "for step in steps:\n    go()\x1b[31m"
    found = lines([plain(attack="a", remedies=(Remedy(words="Go on.", paste=paste, code=code),))])
    assert found[:3] == ["Warning: a: It stays.", "  Remedy: Go on.", f"    {paste}"]
    comments = ["    # In your own code:", "    #     for step in steps:", "    #         go()\\x1b[31m"]
    assert found[3:] == comments
    assert lines([plain(code="no_gradient")]) == []


def test_every_whole_number_of_255ths_is_shown_and_nothing_near_it():
    for number in range(1, 1000):
        value = number / 255
        assert float(Fraction(typed(value))) == value
        assert typed(value) == (f"{number}/255" if number % 51 else f"{number / 255:g}")
        assert "/" not in typed(nextafter(value, inf))
    assert retyped("P(s=0.00784313725490196, x=(0.03137254901960784, 0.1))") == "P(s=2/255, x=(8/255, 0.1))"
    assert retyped("-0.03137254901960784") == "-8/255"
    for other in ("n0.03137254901960784 and 0.03137254901960784x", "0.03137254901960785 of 1.03137254901960784.2"):
        assert retyped(other) == other


PGD = "foolbox:LinfPGD(steps=20)"
ADAPTED = f"robust_ext:AdaptedAttack(attack='{PGD}', bpda='q', eot=8)"


SHORT = [
    {PGD: "PGD-20", ADAPTED: "PGD-20, BPDA q, EoT 8", "mine": "mine", "a/b.py:fgsm": "fgsm"},
    # Names that would be alike differ by library, by other settings, or stay as they are.
    {PGD: "PGD-20 (foolbox)", "art:ProjectedGradientDescent(max_iter=20)": "PGD-20 (art)"},
    {"foolbox:L2PGD(r=1)": "PGD (r=1)", "foolbox:L2PGD(r=2)": "PGD (r=2)"},
    {"foolbox:FGSM() through EoT 8": "FGSM, EoT 8", "margin through EoT 8": "margin through EoT 8"},
    {"robust_ext:Square": "Square (robust_ext)", "Square": "Square"},
    {"one:A(x=1)": "A (one, x=1)", "two:A(x=1)": "A (two, x=1)", "two:A(x=2)": "A (two, x=2)"},
    # What is no call with settings is no attack of a library.
    {name: name for name in ("f(x)", "a:b(", "CE: one (x)", "", "A(x=y)")},
]


def test_short_names_are_all_different():
    for short in SHORT:
        assert {name: name for name in short} | short_names([*short]) == short


def test_reports_call_attacks_by_short_names_and_say_what_they_stand_for():
    """Not inside other texts: those to paste run as they are."""
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    result = made.make_diagnosis(PGD, "ddn")
    remedy = {**result["findings"][0]["remedies"][0], "paste": f'attack = "{PGD}"'}
    finding = {**result["findings"][0], "attack": PGD, "evidence": [f"{PGD} stays; {ADAPTED} does not."]}
    result |= {"findings": [{**finding, "remedies": [remedy]}], "likely": None}
    for text in (" ".join(report_text(result).split()), " ".join(Page(report_page(result)).text.split())):
        assert f"PGD-20 stays; {ADAPTED} does not." in text
        assert text.count(PGD) == text.count(f"'{PGD}'") + text.count(f'"{PGD}"') + 1
