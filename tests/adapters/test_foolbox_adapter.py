"""Foolbox's attack objects, classes and tuples as attacks; what is run of them is compared in test_equality."""

import torch

from robust_ext import ThreatModel, as_attack
from robust_ext.core.random import seeded_globals
from tests.adapters.common import UNIT, conv_network, drawn_seed, predicted, require, run, uniform

foolbox = require("foolbox")

NETWORK = conv_network((1, 10, 10))
X = uniform(6, (1, 10, 10))
Y = predicted(NETWORK, X)


def host(attack, epsilons):
    with seeded_globals(drawn_seed()):
        model = foolbox.PyTorchModel(NETWORK, bounds=UNIT, device="cpu")
        return attack(model, X.clone(), Y, epsilons=epsilons)[1]


def linf(epsilon=0.1):
    return ThreatModel(norm="linf", epsilon=epsilon)


def test_the_distance_of_an_object_follows_the_threat_model_and_it_stays_as_it_is():
    mine = foolbox.attacks.InversionAttack()
    expected = host(foolbox.attacks.InversionAttack(distance=foolbox.distances.linf), None)
    assert torch.equal(run(as_attack(mine), NETWORK, X, Y, linf()), expected)
    assert mine._distance is None


def test_repeated_attacks_keep_what_they_repeat():
    repeated = foolbox.attacks.LinfPGD(steps=1).repeat(3)
    attack = as_attack(repeated)
    assert torch.equal(run(attack, NETWORK, X, Y, linf(0.01)), host(repeated, 0.01))
    assert attack.traits.norms == ("linf",)
    flexible = as_attack(foolbox.attacks.LinearSearchBlendedUniformNoiseAttack(directions=100, steps=20).repeat(2))
    assert flexible.traits.minimum_norm
    assert run(flexible, NETWORK, X, Y, ThreatModel(norm="l1", epsilon=0.1)).shape == X.shape


def test_attacks_of_others_go_one_sample_at_a_time():
    class Mine(foolbox.attacks.LinfFastGradientAttack):
        pass

    attack = as_attack(Mine())
    assert (attack.traits.batching, attack.traits.norms, attack.traits.gradients) == ("single", ("linf",), True)
