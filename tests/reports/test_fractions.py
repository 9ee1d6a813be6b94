"""Numbers that were typed as fractions of 255 are shown as typed, in texts, pages and plots."""

from fractions import Fraction
from math import inf, nextafter

import pytest

from robust_ext.core.wording import retyped, typed
from robust_ext.evaluations.arms import Arm
from robust_ext.reports import report_page, report_text
from tests.reports.mead_results import Arm as MadeArm
from tests.reports.mead_results import make
from tests.reports.pages import Page, plot, words
from tests.reports.results import make_adaptive, make_attack, make_diagnosis, make_result, make_robust_accuracy

EPSILON = 8 / 255


def test_every_whole_number_of_255ths_is_shown_and_nothing_near_it():
    for number in range(1, 1000):
        value = number / 255
        assert float(Fraction(typed(value))) == value
        assert typed(value) == (f"{number}/255" if number % 51 else f"{number / 255:g}")
        assert "/" not in typed(nextafter(value, inf))
    assert [typed(value) for value in (0, 0.0, 0.1, 0.0314, 2, 1e300, -1.5)] == [
        *("0", "0", "0.1", "0.0314", "2", "1e+300", "-1.5")
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "LinfPGD(abs_stepsize=0.00784313725490196, x=(0.03137254901960784, 0.1))",
            "LinfPGD(abs_stepsize=2/255, x=(8/255, 0.1))",
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
    arm = Arm(attack="robust_ext:APGD", norm="linf", epsilon=EPSILON)
    arms = [MadeArm(name=arm.name, group=arm.group, norm="linf", epsilon=EPSILON, objective="ace", algorithm="pgd")]
    return {
        "binarization": make_result([make_attack("pgd")]),
        "robust_accuracy": robust,
        "adaptive": make_adaptive("pgd", epsilon=EPSILON),
        "diagnosis": make_diagnosis("pgd", epsilon=EPSILON),
        "mead": make(arms, ["nss"], samples=40),
    }


@pytest.mark.parametrize("kind", of_budgets())
def test_epsilons_typed_as_fractions_are_shown_as_typed(kind):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    result = of_budgets()[kind]
    text, page = report_text(result), Page(report_page(result))
    assert "8/255" in page.text
    assert kind == "binarization" or "8/255" in text
    assert not {"0.0313", "0.03137", ".031"} & {*text.split(), *page.text.split()}
    assert "0.0313" not in page.text + text


def test_ticks_of_plots_are_as_typed():
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    page = report_page(of_budgets()["robust_accuracy"])
    assert {"0", "8/255", "16/255"} <= set(words(plot(page, "Robust accuracy over epsilon")))
