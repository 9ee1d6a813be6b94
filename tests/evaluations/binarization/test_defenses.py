"""Attacks on test-time defenses are tested on the defense itself."""

import pytest
import torch

from robust_ext import as_attack, binarization_test
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.core.errors import RunFolderError
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets.load import load_dataset
from robust_ext.defenses.adp import AdaptiveDenoising
from robust_ext.defenses.anti_adversary import AntiAdversary
from robust_ext.defenses.hd import HedgeDefense
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization.planting import plant
from robust_ext.models.adaptive import Purifier
from robust_ext.models.features import split
from tests.evaluations.steps import climb
from tests.evaluations.subjects import Rounding

LINF = ThreatModel(norm="linf", epsilon=0.1)


class Centred(Purifier):
    """Steps away from the mean of a group: what one row comes to depends on the others."""

    batch_level = True

    def step(self, point, *, x, number, state, rng):
        return point + 0.1 * (point - point.mean(0))


def pgd(model, x, y, threat_model):
    return climb(model, x, y, epsilon=threat_model.epsilon, steps=15, step=0.2)


def by_bpda(**settings):
    return AdaptedAttack(attack=as_attack(pgd), **settings)


def run(defense, *attacks, **settings):
    inputs, _ = load_dataset("digits").take(range(8))
    small = {"inner_points": 60, "random_inner": 20, "random_corners": 20, "canaries": 2}
    return binarization_test(defense, list(attacks), inputs, LINF, kappa=0.9, **small, **settings)


def test_zero_gradients_fail_and_the_wrapper_passes():
    attacks = pgd, by_bpda(), by_bpda(gradient_mode="trajectory")
    result = run(Rounding(digits_network(), steps=2), *attacks)
    plain, identity, trajectory = result.content["attacks"]
    assert identity["name"] == "pgd through identity"
    assert plain["score"] <= 0.2
    assert min(identity["score"], trajectory["score"]) >= 0.8
    assert plain["samples"] == identity["samples"] >= 6
    assert identity["passes"]["backward"] > 0


@pytest.mark.parametrize("kind", [pytest.param(HedgeDefense, marks=pytest.mark.exhaustive), AntiAdversary])
def test_defenses_that_query_the_classifier_are_tested_reproducibly(kind):
    attack = by_bpda(gradient_mode="trajectory")
    first, again = (run(kind(digits_network(), steps=1, step_size=0.02), attack) for _ in range(2))
    (one,), (two,) = first.content["attacks"], again.content["attacks"]
    assert one["samples"] >= 6
    assert one["score"] >= 0.8
    assert (one["score"], one["random_score"]) == (two["score"], two["random_score"])
    assert list(first.records) == list(again.records)


class Shrinking(torch.nn.Module):
    """A score that pulls towards black."""

    def forward(self, x):
        return -0.2 * x


@pytest.mark.parametrize(
    ("make", "draws"),
    [
        (lambda network: HedgeDefense(network, steps=2, radius=0.1, step_size=0.05), 9),
        (lambda network: AdaptiveDenoising(network, score=Shrinking(), runs=2, steps=2), 1),
    ],
    ids=["random, by majority", "probabilities, one draw held"],
)
def test_a_weak_recipe_fails_and_a_right_one_passes(make, draws):
    """Steps that are too small end on the way; the same through the identity, averaged over draws, are enough."""
    weak = as_attack("foolbox:LinfPGD(steps=20, rel_stepsize=0.005, random_start=False)").named("weak")
    result = run(make(digits_network()), weak, by_bpda(eot=4), draws=draws, depths=(1,))
    small, right = result.content["attacks"]
    assert right["samples"] >= 6
    assert (small["verdict"], small["score"]) == ("failed", pytest.approx(0, abs=0.2))
    assert right["score"] >= 0.85


class Reversal(Centred):
    """Steps away from the mean of four rows, from points that are drawn."""

    random = True

    def start(self, x, rng):
        return x + 0.02 * rng.uniform(x, "start", low=-1, high=1), {}


@pytest.mark.parametrize(("kind", "draws"), [(Centred, 1), pytest.param(Reversal, 5, marks=pytest.mark.exhaustive)])
def test_groups_are_planted_in_and_attacked_as_they_are_judged(kind, draws):
    """What is found is found by the defense itself, in the batch of all candidates."""
    inputs, _ = load_dataset("digits").take(range(6))
    defense = kind(digits_network(), steps=2, group_size=4)
    small = {"inner_points": 60, "random_inner": 20, "random_corners": 20, "canaries": 2, "depths": (1,)}
    weak = as_attack("foolbox:LinfPGD(steps=20, rel_stepsize=0.005, random_start=False)").named("weak")
    result = binarization_test(defense, [weak, by_bpda(eot=draws)], inputs, LINF, kappa=0.9, draws=draws, **small)
    assert result.content["settings"]["batch_size"] == 32
    short, right = result.content["attacks"]
    assert right["samples"] == 6
    assert short["score"] == 0
    assert right["score"] == 1
    assert right["random_score"] <= 0.5


def test_planted_groups_are_solved_together_and_alone():
    """Planted points are adversarial beside each other and beside clean samples; the defense itself says so."""
    inputs, _ = load_dataset("digits").take(range(8))
    network = digits_network()
    defense = Centred(network, steps=2, group_size=4)
    planted = plant(defense, inputs, LINF, inner_points=60)
    points = planted.planted[:, 0]
    assert (len(planted), planted.score(points), planted.score(inputs)) == (8, 1, 0)
    finals = defense.solution(points, seeds=defense.next_seeds(8)).final
    features, module = planted.module.features, planted.judge
    torch.testing.assert_close(features(points), split(network, inputs).features(finals))
    for row in range(8):
        mixed = inputs.clone()
        mixed[row] = points[row]
        assert module(mixed).argmax(1).tolist() == [int(one == row) for one in range(8)]


def test_another_setting_of_the_defense_is_another_run(tmp_path):
    run(Rounding(digits_network(), steps=1), by_bpda(), out=tmp_path)
    with pytest.raises(RunFolderError):
        run(Rounding(digits_network(), steps=2), by_bpda(), out=tmp_path)
