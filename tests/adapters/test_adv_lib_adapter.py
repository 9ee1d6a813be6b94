import torch

from robust_ext import ThreatModel, as_attack
from robust_ext.core.random import seeded_globals
from tests.adapters import common
from tests.adapters.common import conv_network, drawn_seed, predicted, require, uniform

adv_lib = require("adv_lib")
NETWORK = conv_network((3, 8, 8))
X = uniform(6, (3, 8, 8))
Y = predicted(NETWORK, X)
INF = float("inf")


def run(attack, threat_model, seed=3):
    return common.run(attack, NETWORK, X, Y, threat_model, seed=seed)


def host(function, **settings):
    with seeded_globals(drawn_seed()):
        return function(NETWORK, X.clone(), Y, **settings)


def test_greek_settings_norms_and_penalties_can_be_written():
    linf, l2 = (ThreatModel(norm=norm, epsilon=0.0625) for norm in ("linf", "l2"))
    attack = as_attack("adv_lib:alma(τ=0.5, num_steps=30)")
    by_hand = host(adv_lib.attacks.alma, **{"τ": 0.5, "num_steps": 30})
    assert torch.equal(run(attack, l2), by_hand)
    attack = as_attack("adv_lib:fmn(norm='linf')")
    assert attack.traits.norms == ("linf",)
    assert torch.equal(run(attack, linf), host(adv_lib.attacks.fmn, **{"norm": INF}))
    penalty = adv_lib.utils.lagrangian_penalties.all_penalties["P3"]
    attack = as_attack("adv_lib:alma(penalty='P3', num_steps=5)")
    by_hand = host(adv_lib.attacks.alma, **{"penalty": penalty, "num_steps": 5})
    assert torch.equal(run(attack, l2), by_hand)
    assert " at 0x" not in attack.description
