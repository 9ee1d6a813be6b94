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
from tests.evaluations.steps import climb
from tests.evaluations.subjects import Rounding

LINF = ThreatModel(norm="linf", epsilon=0.1)


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


def test_another_setting_of_the_defense_is_another_run(tmp_path):
    run(Rounding(digits_network(), steps=1), by_bpda(), out=tmp_path)
    with pytest.raises(RunFolderError):
        run(Rounding(digits_network(), steps=2), by_bpda(), out=tmp_path)
