"""Candidates outside the threat model are a warning in every evaluation, with how many and how far."""

import re

import pytest

import robust_ext
from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from tests.evaluations.small import KINDS, call
from tests.evaluations.steps import gradient

X, Y = load_dataset("digits").take(range(16))
LINF = ThreatModel(norm="linf", epsilon=0.1)


def evaluate(kind, attack, **given):
    return call(kind, digits_network(), attack, X, Y, LINF, **given)


def foolbox_attack(name, **settings):
    """As Foolbox's own documentation calls one, with a list of budgets."""

    def attack(model, x, y):
        foolbox = pytest.importorskip("foolbox")
        model = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
        _, candidates, _ = getattr(foolbox.attacks, name)(**settings)(model, x, y, epsilons=[2.0])
        return candidates[0]

    return attack


def gradient_step(size, clip=True):
    def attack(model, x, y):
        moved = x + size * gradient(model, x, y).sign()
        return moved.clamp(0, 1) if clip else moved

    return attack


OUTSIDE = {
    "l2 CW for linf": (foolbox_attack("L2CarliniWagnerAttack", steps=20), "beyond epsilon"),
    "no projection": (gradient_step(0.25), "beyond epsilon"),
    "no clipping": (gradient_step(0.1, clip=False), "out of the bounds"),
    "images in [-1, 1]": (lambda model, x, y: 2 * x - 1, "out of the bounds"),
}


def warned(result):
    return [text for text in result.content["warnings"] if "Candidates lay" in text]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["no projection", "no clipping"])
def test_every_evaluation_says_so(kind, case):
    attack, what = OUTSIDE[case]
    with pytest.warns(robust_ext.RobustExtWarning, match=f"Candidates lay {what}"):
        result = evaluate(kind, attack)
    assert len(warned(result)) == 1


@pytest.mark.parametrize("case", OUTSIDE)
def test_it_is_said_how_many_and_how_far(case):
    attack, what = OUTSIDE[case]
    (text,) = warned(evaluate("robust_accuracy", {case: attack}))
    candidates = attack(digits_network(), X, Y)
    distances = (candidates - X).flatten(1).abs().amax(1) / 0.1
    out = (candidates.flatten(1).amin(1) < -1e-5) | (candidates.flatten(1).amax(1) > 1 + 1e-5)
    rows = out if what == "out of the bounds" else (distances > 1.001) & ~out
    count, total, middle, most = map(
        float, re.search(r": (\d+) of (\d+), at ([\d.]+) .* and ([\d.]+) at most", text).groups()
    )
    assert (count, total) == (int(rows.sum()), len(X))
    assert middle == pytest.approx(float(distances[rows].quantile(0.5)), rel=0.01)
    assert most == pytest.approx(float(distances[rows].max()), rel=0.01)


@pytest.mark.parametrize("kind", ["robust_accuracy", "binarization"])
def test_nothing_is_said_of_sound_attacks_and_of_perturbations_that_have_to_be_larger(kind):
    for attack in ("foolbox:LinfPGD(steps=3)", "foolbox:LinfDeepFoolAttack(steps=20)", gradient_step(0.1)):
        assert warned(evaluate(kind, attack)) == []


@pytest.mark.parametrize("attack", ["no projection", "no clipping", "still"])
@pytest.mark.parametrize("kind", ["diagnosis", "binarization", "robust_accuracy"])
def test_no_more_samples_are_counted_than_were_given(attack, kind):
    """Labelled samples, or these and the problems planted in some of them, which is said."""
    function = OUTSIDE[attack][0] if attack in OUTSIDE else lambda model, x, y: x
    given = {"planted": 12, "inner_points": 50} if kind == "diagnosis" else {}
    counted = [one for one in evaluate(kind, function, **given).findings if one.of is not None]
    assert counted
    for one in counted:
        assert one.of <= len(X) or one.unit == "samples and planted problems", one
    assert kind == "diagnosis" or {one.unit for one in counted} == {"samples"}
