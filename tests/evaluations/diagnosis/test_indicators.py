"""What is wrong with an attack, from made records, alone and beside others; published indicators; its remedies."""

from functools import partial

import pytest
import torch

from robust_ext import ThreatModel, as_attack
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import CallableAttack
from robust_ext.attacks.square import Square
from robust_ext.core.specification import parse_call
from robust_ext.evaluations.causes import remedies
from robust_ext.evaluations.causes.comparisons import compare_attacks
from robust_ext.evaluations.causes.finding import CODES, Finding
from robust_ext.evaluations.causes.indicators import find_attack_faults, ioaf, most_likely, unstable_predictions
from robust_ext.evaluations.causes.probes import ModelProbe

LINF = ThreatModel(norm="linf", epsilon=0.1)
# A sign attack of 40 steps of a tenth of epsilon, that came to rest at the edge of the ball without success.
TRACE = {
    "queries": 41, "graphs": 40, "cut": 0, "gradients": 40, "zero": 0, "non_finite": 0, "zero_loss": 0,
    "other_label": 0, "turns": 0.05, "first": -8.0, "best": -2.0, "last": -2.0, "best_at": 30, "adversarial_at": None,
    "late": 0.0, "scale": 12.0, "saturated": 0, "reach": 1.0, "end": 1.0, "low": 0.0, "high": 1.0, "step": 0.1,
    "longest": 0.1, "follows": 1.0, "uses": 1.0, "back": 0.0, "held": 0.0, "grid": 0, "elsewhere": 0.0, "slope": 1.0,
    "shift": 0.0, "outside": 0, "unmoved": 1, "batch_queries": 41
}  # fmt: skip
ENTRY = {"outcome": "not_adversarial", "distance": 0.1, "correct": True, "canary": None, "random_found": False}


def entry(*, trace=None, **changes):
    """One sample; ``trace`` holds what differs in its trace."""
    return {**ENTRY, "trace": {**TRACE, **(trace or {})}, **changes}


def entries(count=10, *, solved=2, trace=None, **changes):
    """Some samples that an attack did not solve, and some that it did."""
    done = entry(outcome="found", trace={"adversarial_at": 20, "best": 1.0, "last": 1.0})
    return [entry(trace=trace, **changes) for _ in range(count)] + [done] * solved


def first(left, attack=None, *, fault=None):
    """The code of the first cause, beside a fault of the model's of this code."""
    probe = fault and ModelProbe(findings=(Finding(code=fault, cause="It is at fault.", layer="net.squash"),))
    found = find_attack_faults("a", attack or APGD(), left, threat_model=LINF, probe=probe)
    assert all(one.attack == "a" and one.evidence and one.code in CODES for one in found if not fault)
    likely = most_likely(found)
    return None if likely is None else likely.code


# Faults by what differs from a sound attack that did not solve ten of twelve samples, and the finding that is first.
SYMPTOMS = {
    "sound": ({}, None),
    "zero at every second step": ({"trace": {"zero": 20}}, "zero_gradient"),
    "zero at some steps": ({"trace": {"zero": 10}}, None),
    "flat loss by the logits": ({"trace": {"zero": 40, "zero_loss": 40, "saturated": 41}}, "saturated_loss"),
    "from a random start": ({"trace": {"step": 0.01, "late": 0.6}}, "short_path"),
    "small steps that ended": ({"trace": {"step": 0.001, "late": 0.0}}, None),
    "tiny steps all along": ({"trace": {"step": 0.001, "longest": 0.001, "late": 0.0}}, "short_path"),
    "longer ones at first": ({"trace": {"step": 0.001, "longest": 0.03, "late": 0.0}}, None),
    "one small step": (
        {"distance": 0.01, "trace": {"queries": 1, "gradients": 1, "step": None, "reach": 0.0, "end": 0.0}},
        "short_path"
    ),
    "rises to the end": ({"trace": {"late": 0.6}}, "still_improving"),
    "rises a little": ({"trace": {"late": 0.3}}, None),
    "turns at small steps": ({"trace": {"step": 0.1, "turns": 0.9}}, None),
    "no gain": ({"trace": {"best": -8.0}}, "flat_loss"),
    "downhill for others": ({"trace": {"best": -8.0, "last": -10.0, "other_label": 40}}, "predicted_labels"),
    "by rounding alone": ({"trace": {"adversarial_at": 12, "best": 1e-6}}, None),
    "inputs returned": (
        {"distance": 0.0, "trace": {"reach": 0.0, "end": 0.0, "unmoved": 41, "step": 0.0, "best": -8.0, "last": -8.0}},
        "unmoved"
    ),
    "held back early": ({"trace": {"reach": 0.0039, "end": 0.0039, "step": 0.0}, "distance": 0.00039}, "epsilon_scale"),
    "in [0, 255]": ({"outcome": "beyond_epsilon", "distance": 25.5, "trace": {"step": 25.0}}, "epsilon_scale"),
    "held in them by chance": ({"count": 3, "solved": 0, "trace": {"low": 0.3, "high": 0.7}}, None),
    "others beyond them": ({"trace": {"low": 0.3, "high": 0.7}}, None),
    "moved from the bounds": ({"trace": {"low": 0.1}}, None),
    "moved from them by less": ({"trace": {"low": 0.04, "high": 0.96, "end": 0.4}}, None),
    "predictions attacked": (
        {"trace": {"adversarial_at": 9, "best": 1.0, "other_label": 15, "turns": 0.8}}, "predicted_labels"
    ),
    "NaN returned": ({"outcome": "not_finite", "distance": None}, "crashed"),
    "never came back": ({"outcome": "timed_out", "distance": None, "trace": None}, "crashed"),
    "no gradient wanted": ({"trace": {"graphs": 0, "gradients": 0, "zero": None, "late": 3.0}}, None)
}  # fmt: skip


@pytest.mark.parametrize("name", SYMPTOMS)
def test_the_first_cause_of_many_samples_and_none_of_one_in_many(name):
    changes, expected = SYMPTOMS[name]
    assert first(entries(**changes)) == expected
    if expected != "crashed":
        assert first([entry(**changes), *entries(20)]) is None


def test_minimum_norm_attacks_may_come_from_outside():
    for changes in (
        {"trace": {"reach": 3.0, "outside": 41, "best": -8.0, "zero": 30, "zero_loss": 30}},
        {"trace": {"reach": 0.4, "end": 0.4, "step": 0.01, "late": 1.0}},
    ):
        assert first(entries(**changes), as_attack("foolbox:DDNAttack")) is None


def test_an_attack_that_takes_no_gradient_does_not_fail_for_one():
    probe = ModelProbe(findings=(Finding(code="zero_gradient", cause="It rounds.", layer="net.quantise"),))
    free = entries(solved=0, trace={"graphs": 0, "gradients": 0, "zero": None})
    found = find_attack_faults("square", APGD(), free, threat_model=LINF, probe=probe)
    assert [one.code for one in found] == ["no_gradient"]


@pytest.mark.parametrize(
    ("found", "expected"), [([True] * 16, None), ([False] + [True] * 15, "saturated_layer"), ([], "saturated_layer")]
)
def test_what_an_attack_averages_over_is_no_cause_where_it_finds_what_is_planted(found, expected):
    left = entries() + [entry(outcome="found" if one else "not_adversarial", planted=True) for one in found]
    averaging = AdaptedAttack(attack=APGD(), noise=0.5, eot=16)
    assert first(left, averaging, fault="saturated_layer") == expected
    assert first(left, fault="saturated_layer") == "saturated_layer"
    # Where nothing is planted, most of the samples are what it can succeed in.
    assert first(entries(solved=10), averaging, fault="saturated_layer") is None


@pytest.mark.parametrize("code", [None, "saturated_loss"])
def test_cross_entropy_that_is_flat_is_no_cause_for_an_attack_on_another_loss(code):
    """Its gradients are no zeros, wherever those of cross-entropy are."""
    trace = {"zero": 40, "zero_loss": 40} if code else {}
    left = entries(trace={**trace, "saturated": 41, "scale": 900.0})
    assert first(left, APGD(loss="margin"), fault="saturated_loss") == code


@pytest.mark.parametrize("repaired", [0, 1, 2, 5])
def test_canaries_count_as_in_verdicts(repaired):
    left = entries(0, solved=12)
    left[:5] = [{**one, "canary": "repaired" if number < repaired else "kept"} for number, one in enumerate(left[:5])]
    assert first(left) == ("predicted_labels" if repaired > 1 else None)


def test_misclassified_samples_that_come_back_right():
    assert first(entries(0, solved=12) + [entry(correct=False)] * 3) == "predicted_labels"
    assert first(entries(0, solved=12) + [entry(correct=False, outcome="found")] * 3) is None


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
    steps, rise = (3, None) if count < 10 else (40, 0.0)
    trace = {"queries": count, "batch_queries": count, "gradients": steps, "step": 1 / 3, "longest": 1 / 3}
    trace["late"] = rise
    left = entries(unsolved, solved=0, trace=trace)
    left += [entry(outcome="found", trace={**trace, "adversarial_at": at})] * late
    left += [entry(outcome="found", trace={**trace, "adversarial_at": 1})] * early
    attack = as_attack(f"foolbox:LinfBasicIterativeAttack(steps={steps})")
    assert first(left, attack) == expected
    if expected:
        found = find_attack_faults("bim", attack, left, threat_model=LINF)
        assert found[0].remedies[0].attack == "foolbox:LinfBasicIterativeAttack(steps=12)"


# Attacks against one another: who wins what, and what it means.
MANY, FREE, SINGLE = {"gradients": 40}, {"graphs": 0, "gradients": 0}, {"gradients": 1}


def left(solved, of=20, *, trace=None, **changes):
    """An attack that solved the first samples."""
    return entries(solved, solved=0, trace=trace, **{"outcome": "found", **changes}) + entries(
        of - solved, solved=0, trace=trace, **changes
    )


def codes(mine, theirs=(), attack=None, **others):
    """What is found about an attack, beside another one."""
    given = {"mine": mine, **({"theirs": theirs} if theirs else {})}
    found = compare_attacks(given, {"mine": APGD(), "theirs": attack or APGD()}, judged=["mine"], **others)
    assert all(one.attack == "mine" and one.samples <= one.of for one in found)
    return [one.code for one in found]


def test_a_weaker_kind_wins_by_three_samples_and_a_tenth():
    for trace, attack, expected in (
        (FREE, Square(), "gradient_free_wins"),
        (FREE, APGD(), "gradient_free_wins"),
        (SINGLE, APGD(), "single_step_wins"),
    ):
        for solved, wins in ((5, False), (7, False), (8, True), (20, True)):
            found = codes(left(5, trace=MANY), left(solved, trace=trace), attack=attack)
            assert found == [expected] * wins


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (MANY, MANY, "loop_at_fault"),
        (SINGLE, MANY, "weaker_kind"),
        (FREE, FREE, "weaker_kind"),
        (FREE, MANY, "weaker_kind"),
    ],
)
@pytest.mark.parametrize(
    ("gained", "lost", "wins"), [(4, 0, False), (5, 0, True), (6, 1, False), (7, 1, True), (8, 2, False), (9, 2, True)]
)
def test_a_stronger_one_wins_beyond_noise(mine, theirs, expected, gained, lost, wins):
    """By the binomial distribution: of 5 samples 1/32, of 7 8/128, of 8 9/256, of 10 56/1024, of 11 67/2048."""
    weaker, stronger = left(lost, trace=mine), [*left(0, of=lost, trace=theirs), *left(gained, 20 - lost, trace=theirs)]
    assert codes(weaker, stronger) == ([expected] if wins else [])
    parts, attacks = {"mine": weaker, "theirs": stronger}, {"mine": APGD(), "theirs": APGD()}
    assert not compare_attacks(parts, attacks), "parts of one evaluation may be of different strength"


def test_what_the_same_gradients_find_is_no_sign_that_they_mislead():
    mine, square, step = left(0, trace=MANY), left(12, trace=FREE), left(10, trace=SINGLE)
    attacks = {"mine": APGD(), "square": Square(), "step": APGD(steps=1), "many": APGD()}

    def found(mine=mine, **entries):
        return [one.code for one in compare_attacks({"mine": mine, **entries}, attacks, judged=["mine"])]

    assert found(square=square) == ["gradient_free_wins"]
    assert found(square=square, step=step) == ["single_step_wins"]
    assert found(square=left(20, trace=FREE), step=step) == ["gradient_free_wins", "single_step_wins"]
    assert found(square=square, step=left(2, trace=SINGLE)) == ["gradient_free_wins"]
    # Where both find a few more, by chance or not, gradients are not to blame.
    assert not found(left(80, 100, trace=MANY), square=left(86, 100, trace=FREE), many=left(84, 100, trace=MANY))


def test_samples_lost_with_a_larger_budget_or_kept_without_any():
    for solved, kind, others, expected in (
        (10, "larger", left(10), []),
        (10, "larger", left(20), []),
        # As many solved as before, but others.
        (10, "larger", left(10)[::-1], ["larger_budget_less"]),
        (5, "unbounded", left(15), []),
        (5, "unbounded", left(5), ["unbounded_fails"]),
    ):
        assert codes(left(solved), **{kind: {"mine": others}}) == expected


def test_samples_that_were_misclassified_or_not_attacked_do_not_count():
    mine = [*left(0, of=10, trace=MANY, correct=False), *left(0, of=10, trace=MANY, outcome="timed_out")]
    assert codes(mine, left(20, trace=FREE), Square()) == []


# The six indicators by their published definitions, on a network whose losses are known.
ADVERSARIAL = {"best": 1.0, "lowest": -3.0, "adversarial_at": 4, "recent": 0.0}
RISING = {"best": -1.0, "lowest": -3.0}


# An indicator, the trace of a sample that it counts, and what another's is or has.
SHARES = [
    ("unavailable_gradients", {"zero": 3}, {"zero": 0}, {}),
    ("unavailable_gradients", {"graphs": 4, "gradients": 0}, {"graphs": 0, "gradients": 0}, {}),
    ("silent_success", ADVERSARIAL, {"adversarial_at": None}, {}),
    ("silent_success", ADVERSARIAL, ADVERSARIAL, {"outcome": "found"}),
    ("incomplete_optimization", RISING | {"recent": 0.101}, RISING | {"recent": 0.099}, {}),
    # A loss that never moves is finished, by their definition.
    ("incomplete_optimization", RISING | {"recent": 2.0}, {"best": -3.0, "lowest": -3.0, "recent": 0.0}, {}),
]


def test_shares_of_samples():
    for name, bad, good, more in SHARES:
        assert ioaf([entry(trace=bad), *[entry(trace=good, **more)] * 3])[name] == 0.25, (name, bad)


def test_what_was_not_measured_is_none_and_transfer_and_unbounded_attacks():
    fooled, kept = entry(outcome="found"), entry(trace={"adversarial_at": None})
    found = ioaf([fooled, kept])
    missing = ("unstable_predictions", "transfer_failure", "unconstrained_attack_failure")
    assert [found[name] for name in missing] == [None, None, None]
    found = ioaf([fooled, kept], unbounded=[fooled, kept, fooled, fooled], surrogate=[True, True])
    assert (found["unconstrained_attack_failure"], found["transfer_failure"]) == (0.25, 0.5)
    assert ioaf([])["silent_success"] is None


def test_unstable_predictions_in_closed_form():
    """At a margin of one half, u uniform in +-r moves the loss by |u| / .5, of mean r; a margin of 0 counts as 1."""

    def slope(x):
        """The margin of label 0 is the first value."""
        return torch.stack([x[:, 0], torch.zeros(len(x))], 1)

    inputs, labels = torch.tensor([[0.5, 0.5]] * 8), torch.zeros(8, dtype=torch.int64)
    found = unstable_predictions(slope, inputs, labels, threat_model=LINF, radius=0.3)
    assert found == pytest.approx(0.3, abs=0.03)
    assert unstable_predictions(slope, 0 * inputs, labels, threat_model=LINF, radius=0.3) == 1.0


# Remedies: texts that can be run, in each library's own words, and what they change.
# Of bounds that are 2 apart, of which torchattacks sees half.
WIDE = ThreatModel(norm="linf", epsilon=0.1, bounds=(-1, 1))
EPSILON = partial(remedies.for_epsilon, threat_model=WIDE)
LONGER = partial(remedies.for_length, steps=20, step=1 / 30, threat_model=WIDE)
SHORTER = partial(remedies.for_step, steps=20, threat_model=WIDE)
LOSS = partial(remedies.for_loss, scale=1000.0)
# What makes remedies, the attack, and what the first ones set.
IN_WORDS = [
    # A step of that scale stays the same part of epsilon; one that is larger than the epsilon was of another.
    (EPSILON, "torchattacks:PGD(eps=0.2/255, alpha=0.05/255)", ["(alpha=0.0125)"]),
    (EPSILON, "torchattacks:PGD(eps=0.2/255, alpha=0.01)", ["(alpha=0.01)"]),
    (EPSILON, "art:ProjectedGradientDescent(eps=8, eps_step=2, max_iter=7)", ["(eps_step=0.025, max_iter=7)"]),
    (LONGER, "foolbox:LinfPGD(steps=20)", ["rel_stepsize=0.125", "steps=80"]),
    (LONGER, "foolbox:LinfPGD(steps=20, abs_stepsize=0.00334)", ["abs_stepsize=0.0125", "steps=80"]),
    # Its inputs are in [0, 1], where those of this threat model go from -1 to 1.
    (LONGER, "torchattacks:PGD(steps=20, alpha=0.00167)", ["alpha=0.00625", "steps=80"]),
    (LONGER, "adv_lib:pgd_linf(steps=20)", ["relative_step_size=0.125", "steps=80"]),
    (SHORTER, "art:ProjectedGradientDescent(max_iter=20, eps_step=0.1)", ["eps_step=0.0125", ""]),
    (LOSS, "art:AutoProjectedGradientDescent", ["loss_type='difference_logits_ratio'"]),
    (LOSS, "adv_lib:pgd_linf", ["loss_function='dlr'"]),
    (LOSS, "robust_ext:APGD", ["loss='margin'"]),
    (LOSS, "foolbox:LinfPGD", ["temperature=100.0"]),
]


@pytest.mark.parametrize("number", range(len(IN_WORDS)))
def test_remedies_are_in_each_librarys_words(number):
    make, text, expected = IN_WORDS[number]
    found = make(as_attack(text))
    for remedy, words in zip(found, expected, strict=make is not LOSS):
        assert words in remedy.attack
        assert as_attack(remedy.attack).traits.batching
    assert make is not LONGER or {parse_call(one.attack).name for one in found} == {parse_call(text).name}
    assert make is not LOSS or any("scatter" in one.code for one in found[1:])


# Attack (PGD of Foolbox where only settings stand), steps that were taken, the median step seen, the most steps of any
# sample; and settings that are proposed.
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
