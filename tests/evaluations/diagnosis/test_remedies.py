"""Remedies: texts that can be run, in each library's own words, and what they change."""

import pytest
import torch

from robust_ext import ThreatModel, as_attack
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import CallableAttack
from robust_ext.core.specification import parse_call
from robust_ext.evaluations.causes import remedies
from robust_ext.evaluations.causes.rewriting import call_of
from tests.evaluations.diagnosis.zoo.cases import LINF

# Of bounds that are 2 apart, of which torchattacks sees half.
WIDE = ThreatModel(norm="linf", epsilon=0.1, bounds=(-1, 1))


@pytest.mark.parametrize(
    "text",
    [
        "foolbox:LinfPGD",
        "foolbox:L2CarliniWagnerAttack(binary_search_steps=3)",
        "art:ProjectedGradientDescent(max_iter=20, eps_step=0.01)",
        "torchattacks:PGD(steps=7, alpha=0.01)",
        "adv_lib:pgd_linf(steps=10, loss_function='dlr')",
        "robust_ext:APGD(steps=12)",
        "robust_ext:AdaptedAttack(attack='foolbox:LinfPGD(steps=20)', bpda='net.quantise', eot=8)",
    ],
)
def test_a_text_is_kept_and_the_same_attack_under_another_name_gets_one(text):
    for attack in (as_attack(text), as_attack(text, name="mine")):
        again = as_attack(call_of(attack).changed())
        assert again.description.replace("APGD-CE", "") == attack.description.replace("APGD-CE", "")


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        # A step of that scale stays the same part of epsilon; one that is larger than the epsilon was of another.
        ("torchattacks:PGD(eps=0.2/255, alpha=0.05/255)", {"alpha": 0.0125}),
        ("torchattacks:PGD(eps=0.2/255, alpha=0.01)", {"alpha": 0.01}),
        ("art:ProjectedGradientDescent(eps=8, eps_step=2, max_iter=7)", {"eps_step": 0.025, "max_iter": 7}),
    ],
)
def test_epsilon_is_left_to_the_threat_model(text, fixed):
    (remedy,) = remedies.for_epsilon(as_attack(text), WIDE)
    assert parse_call(remedy.attack).arguments == fixed


@pytest.mark.parametrize(
    ("text", "steps", "step"),
    [
        ("foolbox:LinfPGD(steps=20)", "steps=80", "rel_stepsize=0.125"),
        ("foolbox:LinfPGD(steps=20, abs_stepsize=0.00334)", "steps=80", "abs_stepsize=0.0125"),
        ("art:ProjectedGradientDescent(max_iter=20, eps_step=0.00334)", "max_iter=80", "eps_step=0.0125"),
        # Its inputs are in [0, 1], where those of this threat model go from -1 to 1.
        ("torchattacks:PGD(steps=20, alpha=0.00167)", "steps=80", "alpha=0.00625"),
        ("adv_lib:pgd_linf(steps=20)", "steps=80", "relative_step_size=0.125"),
        ("robust_ext:ObjectivePGD(steps=20, rel_step_size=0.0334)", "steps=80", "rel_step_size=0.125"),
    ],
)
def test_longer_paths_in_each_librarys_words(text, steps, step):
    larger, more = remedies.for_length(as_attack(text), steps=20, step=1 / 30, threat_model=WIDE)
    assert step in larger.attack
    assert steps in more.attack
    assert {parse_call(one.attack).name for one in (larger, more)} == {parse_call(text).name}


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("foolbox:LinfPGD(steps=20, rel_stepsize=1.0)", "rel_stepsize=0.125"),
        ("art:ProjectedGradientDescent(max_iter=20, eps_step=0.1)", "eps_step=0.0125"),
        ("torchattacks:PGD(steps=20, alpha=0.05)", "alpha=0.00625"),
    ],
)
def test_shorter_steps_in_each_librarys_words(text, step):
    smaller, schedule = remedies.for_step(as_attack(text), steps=20, threat_model=WIDE)
    assert step in smaller.attack
    assert as_attack(schedule.attack).traits.batching


def _stepping(model, x, y, steps=100):
    return x


# Attack (PGD of Foolbox where only settings stand), steps that were taken, the median step seen, the most steps of any
# sample; and settings that are proposed.
PROPOSED = {
    "as it is set": ("steps=20, rel_stepsize=0.02", 20, 0.02, 20, ["rel_stepsize=0.125", "steps=130"]),
    "a step that is held up": ("steps=20, rel_stepsize=0.05", 20, 0.01, 20, ["rel_stepsize=0.125", "steps=50"]),
    "defaults": ("steps=10", 10, 0.01, 10, ["rel_stepsize=0.25", "steps=80"]),
    "of ART": (
        "art:ProjectedGradientDescent(max_iter=10, eps_step=0.01)", 10, 0.02, 10, ["eps_step=0.025", "max_iter=30"]
    ),
    "set to enough already": ("steps=40, rel_stepsize=0.1", 40, 0.005, 40, ["robust_ext:APGD(steps=50)"]),
    "no larger step, more steps": ("steps=4, rel_stepsize=0.6", 4, 0.1, 4, ["rel_stepsize=0.625", "steps=5"]),
    "ends by itself": ("steps=100, rel_stepsize=0.02", 20, 0.02, 20, ["", "rel_stepsize=0.125"]),
    "ends by itself, with steps that are long": ("steps=100, rel_stepsize=0.2", 4, 0.2, 4, ["", "rel_stepsize=0.625"]),
    "a function that ends by itself": (CallableAttack(_stepping), 12, 0.01, 12, ["", "step_size"]),
    "one that says nothing, with calls of different lengths": (CallableAttack(print), 12, 0.01, 30, ["", "step_size"]),
    "one that says nothing": (CallableAttack(print), 12, 0.01, 12, ["or 250 steps"])
}  # fmt: skip


@pytest.mark.parametrize("name", PROPOSED)
def test_only_what_makes_a_path_longer_is_proposed(name):
    attack, steps, seen, most, expected = PROPOSED[name]
    if isinstance(attack, str):
        attack = as_attack(attack if ":" in attack else f"foolbox:LinfPGD({attack})")
    found = remedies.for_length(attack, steps=steps, step=seen, threat_model=LINF, most=most)
    assert len(found) == len(expected)
    for remedy, words in zip(found, expected, strict=True):
        assert words in (remedy.attack or remedy.code)


@pytest.mark.parametrize(
    ("steps", "most", "more"), [(40, 40, True), (36, 40, True), (12, 40, False), (41, 40, True), (80, 80, True)]
)
def test_more_steps_only_where_all_were_taken(steps, most, more):
    found = remedies.for_more_steps(as_attack("foolbox:LinfPGD(steps=40)"), steps=steps, most=most)
    assert ("steps=160" in (found[0].attack or "")) is more


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("art:AutoProjectedGradientDescent", "loss_type='difference_logits_ratio'"),
        ("torchattacks:APGD", "loss='dlr'"),
        ("adv_lib:pgd_linf", "loss_function='dlr'"),
        ("robust_ext:APGD", "loss='margin'"),
        ("foolbox:LinfPGD", "temperature=100.0"),
    ],
)
def test_losses_that_do_not_saturate(text, setting):
    first, *others = remedies.for_loss(as_attack(text), scale=1000.0)
    assert setting in first.attack
    assert as_attack(first.attack)
    assert any("scatter" in one.code for one in others)


def test_a_view_of_an_attack_with_a_view_keeps_both():
    attack = AdaptedAttack(attack=as_attack("foolbox:LinfPGD"), bpda="net.quantise")
    fixed = as_attack(remedies.viewed("Return the best point.", attack, keep_best=True).attack)
    assert (fixed.bpda, fixed.keep_best) == ("net.quantise", True)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_code_for_functions_projects_and_has_a_step_that_reaches(norm):
    inputs, points = torch.zeros(3, 1, 2, 2), torch.rand(3, 1, 2, 2, generator=torch.manual_seed(0)) + 0.2
    model = ThreatModel(norm=norm, epsilon=0.3)
    scope = {"x": inputs, "x_adv": points, "epsilon": model.epsilon, "torch": torch}
    (remedy,) = remedies.for_length(CallableAttack(print), steps=20, step=1 / 30, threat_model=model)
    for found in (remedies.for_ball(CallableAttack(print), model)[0], remedy):
        assert found.attack is None
        exec(found.code, scope)  # noqa: S102 -- as printed
    assert bool(model.contains(scope["x_adv"], inputs).all())
    assert scope["step_size"] == pytest.approx(0.0375)
