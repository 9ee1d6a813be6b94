"""What is wrong with an attack, from what it left: made records, and attacks of every library on a network."""

import pytest

from robust_ext import as_attack
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.task import Task, run_task
from robust_ext.engine.verify import verify
from robust_ext.evaluations.causes.finding import CODES, Finding
from robust_ext.evaluations.causes.indicators import find_attack_faults, most_likely
from robust_ext.evaluations.causes.probes import ModelProbe
from tests.evaluations.diagnosis.traces import LINF, entries, entry

ALL = {"count": 10, "solved": 2}
# Faults by what differs from a sound attack that did not solve ten of twelve samples, and the finding that is first.
SYMPTOMS = {
    "sound": ({}, None),
    "zero gradient": ({"trace": {"zero": 40}}, "zero_gradient"),
    "zero at every second step": ({"trace": {"zero": 20}}, "zero_gradient"),
    "zero at some steps": ({"trace": {"zero": 10}}, None),
    "flat loss by the logits": ({"trace": {"zero": 40, "zero_loss": 40, "saturated": 41}}, "saturated_loss"),
    "cut graph": ({"trace": {"cut": 40, "gradients": 0, "zero": None, "step": None}}, "cut_gradient"),
    "NaN in gradients": ({"trace": {"non_finite": 40}}, "non_finite_gradient"),
    "steps too small": ({"trace": {"step": 0.01, "reach": 0.4, "end": 0.4, "late": 1.2}}, "short_path"),
    "from a random start": ({"trace": {"step": 0.01, "late": 0.6}}, "short_path"),
    "small steps that ended": ({"trace": {"step": 0.001, "late": 0.0}}, None),
    "tiny steps all along": ({"trace": {"step": 0.001, "longest": 0.001, "late": 0.0}}, "short_path"),
    "longer ones at first": ({"trace": {"step": 0.001, "longest": 0.03, "late": 0.0}}, None),
    "one small step": (
        {"distance": 0.01, "trace": {"queries": 1, "gradients": 1, "step": None, "reach": 0.0, "end": 0.0}},
        "short_path",
    ),
    "rises to the end": ({"trace": {"late": 0.6}}, "still_improving"),
    "rises a little": ({"trace": {"late": 0.3}}, None),
    "back and forth": ({"trace": {"step": 1.5, "turns": 0.9}}, "step_too_large"),
    "turns at small steps": ({"trace": {"step": 0.1, "turns": 0.9}}, None),
    "no gain": ({"trace": {"best": -8.0}}, "flat_loss"),
    "downhill": ({"trace": {"best": -8.0, "last": -10.0}}, "toward_label"),
    "downhill for others": ({"trace": {"best": -8.0, "last": -10.0, "other_label": 40}}, "predicted_labels"),
    "best forgotten": ({"trace": {"adversarial_at": 12, "best": 1.0}}, "best_not_returned"),
    "by rounding alone": ({"trace": {"adversarial_at": 12, "best": 1e-6}}, None),
    "inputs returned": (
        {"distance": 0.0, "trace": {"reach": 0.0, "end": 0.0, "unmoved": 41, "step": 0.0, "best": -8.0, "last": -8.0}},
        "unmoved",
    ),
    "held back early": ({"trace": {"reach": 0.0039, "end": 0.0039, "step": 0.0}, "distance": 0.00039}, "epsilon_scale"),
    "in [0, 255]": ({"outcome": "beyond_epsilon", "distance": 25.5, "trace": {"step": 25.0}}, "epsilon_scale"),
    "not projected": (
        {"outcome": "beyond_epsilon", "distance": 0.4, "trace": {"reach": 4.0, "outside": 30}}, "left_ball"
    ),
    "out of bounds": ({"outcome": "out_of_bounds", "trace": {"outside": 41}}, "wrong_bounds"),
    "held in other bounds": ({"solved": 0, "trace": {"low": 0.3, "high": 0.7}}, "wrong_bounds"),
    "held in them by chance": ({"count": 3, "solved": 0, "trace": {"low": 0.3, "high": 0.7}}, None),
    "others beyond them": ({"trace": {"low": 0.3, "high": 0.7}}, None),
    "moved from the bounds": ({"trace": {"low": 0.1}}, None),
    "moved from them by less": ({"trace": {"low": 0.04, "high": 0.96, "end": 0.4}}, None),
    "predictions attacked": (
        {"trace": {"adversarial_at": 9, "best": 1.0, "other_label": 15, "turns": 0.8}}, "predicted_labels"
    ),
    "NaN returned": ({"outcome": "not_finite", "distance": None}, "crashed"),
    "never came back": ({"outcome": "timed_out", "distance": None, "trace": None}, "crashed"),
    "no gradient wanted": ({"trace": {"graphs": 0, "gradients": 0, "zero": None, "late": 3.0}}, None),
}  # fmt: skip


def _code(found):
    likely = most_likely(found)
    return None if likely is None else likely.code


@pytest.mark.parametrize("name", SYMPTOMS)
def test_the_first_cause(name):
    changes, expected = SYMPTOMS[name]
    found = find_attack_faults("pgd", APGD(), entries(**{**ALL, **changes}), threat_model=LINF)
    assert _code(found) == expected
    assert all(one.attack == "pgd" and one.evidence and one.code in CODES for one in found)


@pytest.mark.parametrize("name", [name for name, (_, code) in SYMPTOMS.items() if code not in (None, "crashed")])
def test_one_sample_of_many_is_no_evidence(name):
    changes, _ = SYMPTOMS[name]
    odd = entry(**changes)
    assert _code(find_attack_faults("pgd", APGD(), [odd, *entries(20)], threat_model=LINF)) is None


def test_minimum_norm_attacks_may_come_from_outside():
    attack = as_attack("foolbox:DDNAttack")
    for changes in (
        {"outcome": "beyond_epsilon", "distance": 0.3},
        {"trace": {"reach": 3.0, "outside": 41, "best": -8.0, "zero": 30, "zero_loss": 30}},
        {"trace": {"reach": 0.4, "end": 0.4, "step": 0.01, "late": 1.0}},
    ):
        assert _code(find_attack_faults("ddn", attack, entries(10, **changes), threat_model=LINF)) is None


def test_a_fault_of_the_model_is_named_with_its_layer_before_its_symptoms():
    fault = Finding(code="zero_gradient", cause="It rounds.", layer="net.quantise")
    left = entries(10, trace={"zero": 40})
    found = find_attack_faults("pgd", APGD(), left, threat_model=LINF, probe=ModelProbe(findings=(fault,)))
    assert [(one.code, one.layer, one.attack) for one in found] == [("zero_gradient", "net.quantise", "pgd")]
    # An attack that takes no gradient does not fail for one.
    free = entries(10, solved=0, trace={"graphs": 0, "gradients": 0, "zero": None})
    found = find_attack_faults("square", APGD(), free, threat_model=LINF, probe=ModelProbe(findings=(fault,)))
    assert [one.code for one in found] == ["no_gradient"]


def _named(code, attack, left):
    fault = Finding(code=code, cause="It is at fault.", layer="net.squash")
    return _code(find_attack_faults("a", attack, left, threat_model=LINF, probe=ModelProbe(findings=(fault,))))


@pytest.mark.parametrize(
    ("found", "expected"), [([True] * 16, None), ([False] + [True] * 15, "saturated_layer"), ([], "saturated_layer")]
)
def test_what_an_attack_averages_over_is_no_cause_where_it_finds_what_is_planted(found, expected):
    planted = [entry(outcome="found" if one else "not_adversarial", planted=True) for one in found]
    left = [*entries(10, solved=2), *planted]
    averaging = AdaptedAttack(attack=APGD(), noise=0.5, eot=16)
    assert _named("saturated_layer", averaging, left) == expected
    assert _named("saturated_layer", APGD(), left) == "saturated_layer"
    # Where nothing is planted, most of the samples are what it can succeed in.
    assert _named("saturated_layer", averaging, entries(10, solved=10)) is None


@pytest.mark.parametrize("code", [None, "saturated_loss"])
def test_cross_entropy_that_is_flat_is_no_cause_for_an_attack_on_another_loss(code):
    """Its gradients are no zeros, wherever those of cross-entropy are."""
    trace = {"zero": 40, "zero_loss": 40} if code else {}
    left = entries(10, trace={**trace, "saturated": 41, "scale": 900.0})
    assert _named("saturated_loss", APGD(loss="margin"), left) == code


@pytest.mark.parametrize("repaired", [0, 1, 2, 5])
def test_canaries_count_as_in_verdicts(repaired):
    left = entries(0, solved=12)
    left[:5] = [{**one, "canary": "repaired" if number < repaired else "kept"} for number, one in enumerate(left[:5])]
    found = find_attack_faults("pgd", APGD(), left, threat_model=LINF)
    assert _code(found) == ("predicted_labels" if repaired > 1 else None)


def test_misclassified_samples_that_come_back_right():
    left = entries(0, solved=12) + [entry(correct=False) for _ in range(3)]
    found = find_attack_faults("pgd", APGD(), left, threat_model=LINF)
    assert _code(found) == "predicted_labels"
    left = entries(0, solved=12) + [entry(correct=False, outcome="found") for _ in range(3)]
    assert _code(find_attack_faults("pgd", APGD(), left, threat_model=LINF)) is None


@pytest.mark.parametrize(
    ("queries", "late", "early", "unsolved", "expected"),
    [
        ((4, 3), 20, 30, 40, "still_improving"),
        ((3, None), 20, 30, 40, "still_improving"),
        # An ascent that has converged; all that was left; of too many steps to count the last alone.
        ((4, 3), 3, 57, 40, None),
        ((4, 3), 20, 30, 0, None),
        ((41, 40), 20, 30, 40, None),
    ],
)
def test_the_last_of_few_steps_solves_much(queries, late, early, unsolved, expected):
    count, at = queries
    steps = 3 if count < 10 else 40
    trace = {"queries": count, "batch_queries": count, "gradients": steps, "step": 1 / 3, "longest": 1 / 3}
    trace["late"] = 0.0 if count >= 10 else None
    left = entries(unsolved, solved=0, trace=trace)
    left += [entry(outcome="found", trace={**trace, "adversarial_at": at})] * late
    left += [entry(outcome="found", trace={**trace, "adversarial_at": 1})] * early
    attack = as_attack(f"foolbox:LinfBasicIterativeAttack(steps={steps})")
    found = find_attack_faults("bim", attack, left, threat_model=LINF)
    assert _code(found) == expected
    if expected:
        assert found[0].remedies[0].attack == "foolbox:LinfBasicIterativeAttack(steps=12)"


def attacked(network, attack, threat_model, *, count=24):
    """What an attack leaves of some samples."""
    inputs, labels = load_dataset("digits").take(range(count))
    counter = PassCounter()
    target = Target(
        module=Counted(network, counter),
        bounds=threat_model.bounds,
        classes=10,
        input_shape=tuple(inputs.shape[1:]),
        device=inputs.device,
        counter=counter,
    )
    task = Task(
        attack=attack, target=target, inputs=inputs, labels=labels, threat_model=threat_model, stream=(0, attack.name)
    )
    result = run_task(task)
    found = verify(result.candidates, inputs, labels, module=network, threat_model=threat_model, attack=attack.name)
    right = network(inputs).argmax(1) == labels
    rows = zip(found.outcomes, found.distances.tolist(), result.trace.rows(), right.tolist(), strict=True)
    return [
        {"outcome": outcome, "distance": distance, "trace": trace, "correct": correct, "canary": None}
        for outcome, distance, trace, correct in rows
    ]


# Attacks that leave samples unsolved where none can be found, or their kind finds none, and are sound.
SOUND = [
    "foolbox:LinfPGD", "foolbox:L2FastGradientAttack", "foolbox:LinfDeepFoolAttack", "foolbox:DDNAttack",
    "foolbox:L2CarliniWagnerAttack(binary_search_steps=3, steps=60)", "foolbox:LInfFMNAttack(steps=50)",
    "foolbox:HopSkipJumpAttack(steps=2, initial_gradient_eval_steps=10, max_gradient_eval_steps=30)",
    "art:AutoProjectedGradientDescent(max_iter=30, nb_random_init=1)", "art:SquareAttack(max_iter=100)",
    "art:MomentumIterativeMethod(max_iter=30)", "torchattacks:PGD(steps=40)", "torchattacks:APGD(steps=50)",
    "torchattacks:FAB(steps=20)", "adv_lib:pgd_linf", "adv_lib:alma(num_steps=200)", "adv_lib:fmn",
    "robust_ext:APGD", "robust_ext:RayS", "robust_ext:RandomSearch", "robust_ext:LinearRegion(budget=300)",
]  # fmt: skip


def check_sound(text, network, scale=1.0):
    """A sound attack has no finding of weight, in the norm it is made for."""
    attack = as_attack(text)
    norm = attack.traits.norms[0]
    model = ThreatModel(norm=norm, epsilon=scale * {"linf": 0.1, "l2": 0.6, "l1": 2.0}[norm])
    left = attacked(network, attack, model)
    found = find_attack_faults(text, attack, left, threat_model=model)
    assert [(one.code, one.evidence) for one in found if one.weight != "low"] == []


@pytest.mark.parametrize("text", ["foolbox:LinfPGD", "foolbox:DDNAttack", "robust_ext:Square(queries=100)"])
def test_sound_attacks(text):
    check_sound(text, digits_network().requires_grad_(False))


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", SOUND)
def test_sound_attacks_of_every_library(text):
    check_sound(text, digits_network().requires_grad_(False), 0.3)
