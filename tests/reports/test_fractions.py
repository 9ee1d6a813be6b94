"""Numbers that were typed as fractions of 255 are shown as typed, and attacks by short names."""

from fractions import Fraction
from math import inf, nextafter

import pytest

from robust_ext.core.wording import retyped, short_names, typed
from robust_ext.reports import report_page, report_text
from tests.reports.mead_results import Arm, make
from tests.reports.pages import Page, plot, words
from tests.reports.results import make_adaptive, make_attack, make_diagnosis, make_result, make_robust_accuracy

EPSILON = 8 / 255


def test_every_whole_number_of_255ths_is_shown_and_nothing_near_it():
    for number in range(1, 1000):
        value = number / 255
        assert float(Fraction(typed(value))) == value
        assert typed(value) == (f"{number}/255" if number % 51 else f"{number / 255:g}")
        assert "/" not in typed(nextafter(value, inf))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "PGD(abs_stepsize=0.00784313725490196, x=(0.03137254901960784, 0.1))",
            "PGD(abs_stepsize=2/255, x=(8/255, 0.1))",
        ),
        ("net0.03137254901960784 and 0.03137254901960784x", "net0.03137254901960784 and 0.03137254901960784x"),
        ("0.03137254901960785 of 1.03137254901960784.2", "0.03137254901960785 of 1.03137254901960784.2"),
        ("-0.03137254901960784", "-8/255"),
    ],
)
def test_in_specifications_and_settings(text, shown):
    assert retyped(text) == shown


def of_budgets():
    """A result of each kind whose budgets were typed as fractions."""
    robust = make_robust_accuracy("pgd")
    for rows in (robust["worst_case"], robust["attacks"][0]["robust_accuracy"]):
        rows[0]["epsilon"], rows[1]["epsilon"] = EPSILON, 2 * EPSILON
    arm = Arm(name="pgd linf 8/255", group="linf 8/255", norm="linf", epsilon=EPSILON, objective="ace", algorithm="pgd")
    return {
        "binarization": make_result([make_attack("pgd")]),
        "robust_accuracy": robust,
        "adaptive": make_adaptive("pgd", epsilon=EPSILON),
        "diagnosis": make_diagnosis("pgd", epsilon=EPSILON),
        "mead": make([arm], ["nss"], samples=40),
    }


@pytest.mark.parametrize("kind", of_budgets())
def test_epsilons_typed_as_fractions_are_shown_as_typed(kind):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    result = of_budgets()[kind]
    text, page = report_text(result), Page(report_page(result))
    assert "8/255" in page.text
    assert kind == "binarization" or "8/255" in text
    assert "0.0313" not in page.text + text
    if kind == "robust_accuracy":
        assert {"0", "8/255", "16/255"} <= set(words(plot(report_page(result), "Robust accuracy over epsilon")))


PGD, ADAPTED = (
    "foolbox:LinfPGD(steps=20)",
    "robust_ext:AdaptedAttack(attack='foolbox:LinfPGD(steps=20)', bpda='q', eot=8)",
)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([PGD, ADAPTED, "mine", "a/b.py:fgsm"], ["PGD-20", "PGD-20, BPDA q, EoT 8", "mine", "fgsm"]),
        # Names that would be alike differ by library, by other settings, or stay as they are.
        ([PGD, "art:ProjectedGradientDescent(max_iter=20)"], ["PGD-20 (foolbox)", "PGD-20 (art)"]),
        ([f"foolbox:L2PGD(r={step})" for step in (1, 2)], ["PGD (r=1)", "PGD (r=2)"]),
        (["foolbox:FGSM() through EoT 8", "margin through EoT 8"], ["FGSM, EoT 8", "margin through EoT 8"]),
        (["robust_ext:Square", "Square"], ["Square (robust_ext)", "Square"]),
        (["one:A(x=1)", "two:A(x=1)", "two:A(x=2)"], ["A (one, x=1)", "A (two, x=1)", "A (two, x=2)"]),
        # What is no call with settings is no attack of a library.
        (["f(x)", "a:b(", "CE: one (x)", "", "A(x=y)"], ["f(x)", "a:b(", "CE: one (x)", "", "A(x=y)"]),
    ],
)
def test_short_names_are_all_different(names, short):
    found = short_names(names)
    assert [found.get(name, name) for name in names] == short
    assert len(set(short)) == len(names)


def test_reports_call_attacks_by_short_names_and_say_what_they_stand_for():
    """Not inside other texts: those to paste run as they are."""
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    result = make_diagnosis(PGD, "ddn")
    remedy = {**result["findings"][0]["remedies"][0], "paste": f'attack = "{PGD}"'}
    finding = {**result["findings"][0], "attack": PGD, "evidence": [f"{PGD} stays; {ADAPTED} does not."]}
    result |= {"findings": [{**finding, "remedies": [remedy]}], "likely": None}
    for text in (" ".join(report_text(result).split()), " ".join(Page(report_page(result)).text.split())):
        assert f"PGD-20 stays; {ADAPTED} does not." in text
        assert text.count(PGD) == text.count(f"'{PGD}'") + text.count(f'"{PGD}"') + 1
