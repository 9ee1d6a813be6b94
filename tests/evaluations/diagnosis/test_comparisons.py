"""Attacks against one another: who wins what, and what it means."""

import pytest
from torch import nn

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.square import Square
from robust_ext.attacks.transfer import Transfer
from robust_ext.evaluations.causes.comparisons import compare_attacks
from tests.evaluations.diagnosis.traces import entry

MANY, FREE, SINGLE = {"gradients": 40}, {"graphs": 0, "gradients": 0}, {"gradients": 1}
SOLVED = {"outcome": "found"}


def left(solved, of=20, *, trace=None, **changes):
    """An attack that solved the first samples."""
    return [entry(trace=trace, **({**SOLVED, **changes} if number < solved else changes)) for number in range(of)]


def codes(mine, theirs=(), **others):
    """What is found about an attack, beside another one."""
    entries = {"mine": mine, **({"theirs": theirs} if theirs else {})}
    attacks = {"mine": APGD(), "theirs": others.pop("attack", APGD())}
    found = compare_attacks(entries, attacks, judged=["mine"], **others)
    assert all(one.attack == "mine" and one.samples <= one.of for one in found)
    return [one.code for one in found]


@pytest.mark.parametrize(
    ("trace", "attack", "expected"),
    [
        (FREE, Square(), "gradient_free_wins"),
        (FREE, APGD(), "gradient_free_wins"),
        (SINGLE, APGD(), "single_step_wins"),
    ],
)
@pytest.mark.parametrize(("solved", "wins"), [(5, False), (7, False), (8, True), (20, True)])
def test_a_weaker_kind_wins_by_three_samples_and_a_tenth(trace, attack, expected, solved, wins):
    found = codes(left(5, trace=MANY), left(solved, trace=trace), attack=attack)
    assert found == ([expected] if wins else [])


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
    entries, attacks = {"mine": weaker, "theirs": stronger}, {"mine": APGD(), "theirs": APGD()}
    assert not compare_attacks(entries, attacks), "parts of one evaluation may be of different strength"


def test_what_the_same_gradients_find_is_no_sign_that_they_mislead():
    mine, square, step = left(0, trace=MANY), left(12, trace=FREE), left(10, trace=SINGLE)
    attacks = {"mine": APGD(), "square": Square(), "step": APGD(steps=1)}

    def found(**entries):
        return [one.code for one in compare_attacks({"mine": mine, **entries}, attacks, judged=["mine"])]

    assert found(square=square) == ["gradient_free_wins"]
    assert found(square=square, step=step) == ["single_step_wins"]
    assert found(square=left(20, trace=FREE), step=step) == ["gradient_free_wins", "single_step_wins"]
    assert found(square=square, step=left(2, trace=SINGLE)) == ["gradient_free_wins"]
    # Where both find a few more, by chance or not, gradients are not to blame.
    mine, square, many = left(80, 100, trace=MANY), left(86, 100, trace=FREE), left(84, 100, trace=MANY)
    given = {"mine": mine, "square": square, "many": many}
    assert not compare_attacks(given, attacks | {"many": APGD()}, judged=["mine"])


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (Transfer(surrogates={"static": nn.Linear(4, 3)}), ["transfer_wins"]),
        (AdaptedAttack(attack=APGD(), noise=0.5, eot=4), ["transfer_wins"]),
        (AdaptedAttack(attack=APGD(), temperature=2.0), ["loop_at_fault"]),
        (APGD(), ["loop_at_fault"]),
    ],
)
def test_examples_made_on_another_model_or_on_the_smoothed_one(attack, expected):
    theirs = left(12, trace=MANY)
    assert codes(left(5, trace=MANY), theirs, attack=attack) == expected
    assert codes(left(5, trace=SINGLE), theirs, attack=attack) == ["weaker_kind"]


@pytest.mark.parametrize(("rows", "expected"), [(2, []), (3, ["random_wins"])])
def test_random_points_that_solve_what_the_attack_does_not(rows, expected):
    mine = left(10)
    for row in (0, *range(10, 10 + rows)):
        # Of what the attack solved too nothing follows.
        mine[row] = {**mine[row], "random_found": True}
    assert codes(mine) == expected


def test_samples_lost_with_a_larger_budget():
    smaller = left(10)
    assert codes(smaller, larger={"mine": left(10)}) == []
    assert codes(smaller, larger={"mine": left(20)}) == []
    # As many solved as before, but others.
    assert codes(smaller, larger={"mine": left(10)[::-1]}) == ["larger_budget_less"]


@pytest.mark.parametrize(("solved", "expected"), [(20, []), (15, []), (5, ["unbounded_fails"])])
def test_no_budget_at_all(solved, expected):
    assert codes(left(5), unbounded={"mine": left(solved)}) == expected


def test_samples_that_were_misclassified_or_not_attacked_do_not_count():
    mine = [*left(0, of=10, trace=MANY, correct=False), *left(0, of=10, trace=MANY, outcome="timed_out")]
    assert codes(mine, left(20, trace=FREE), attack=Square()) == []
