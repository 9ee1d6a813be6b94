"""Estimates before the start against the rows that are really counted."""

import time

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.estimate import row_seconds
from robust_ext.evaluations.binarization.defense import PassCounter, counted_parts
from robust_ext.evaluations.binarization.posing import planting_cost
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from tests.evaluations.subjects import SMALL, random_classifier

THREAT_MODEL = ThreatModel(norm="linf", epsilon=0.1)
APGD, PGD = "robust_ext:APGD(steps=10)", "foolbox:LinfPGD(steps=12)"


@pytest.fixture(scope="module")
def given():
    return random_classifier()


def estimate(call):
    """The rows forward and back that are stated before, and the result."""
    stated = robust_ext.estimate(call).total
    return [stated.forward, stated.backward], call().content


@pytest.mark.parametrize(
    ("attack", "settings", "factor"),
    [
        # With no further depths all is exact but random search, which may find something.
        (APGD, {"depths": (1,), "canaries": 0}, 1.05),
        (APGD, {"depths": (1,), "canaries": 2, "draws": 3}, 1.25),
        (PGD, {"depths": (1,), "canaries": 0, "boundary_points": 3}, 1.25),
        ("robust_ext:Square(queries=30,stop_early=False)", {"depths": (1,), "canaries": 0}, 1.05),
        # Counters leave out the draws of a mean gradient, which take their time all the same.
        ("robust_ext:AdaptedAttack(attack='robust_ext:APGD(steps=5)',noise=0.5,eot=3)", {"depths": (1,)}, 2.5),
        # Which depths an attack is run at follows from what it finds.
        (APGD, {}, 1.6),
        (APGD, {"witness_steps": 0, "witness_queries": 40}, 1.6),
    ],
)
def test_of_the_binarization_test(given, attack, settings, factor):
    network, inputs, _ = given
    (forward, backward), content = estimate(
        lambda: robust_ext.binarization_test(network, attack, inputs, THREAT_MODEL, **SMALL, **settings)
    )
    counted = content["attacks"][0]["passes"]
    assert counted["forward"] <= forward * 1.01 <= counted["forward"] * factor
    assert counted["backward"] <= backward * 1.01


@pytest.mark.parametrize("settings", [{}, {"draws": 3}, {"boundary_points": 3, "inner_points": 7}])
def test_of_planting_is_exact(given, settings):
    network, inputs, _ = given
    checked = BinarizationSettings(threat_model=THREAT_MODEL, **{**SMALL, **settings})
    counter = PassCounter()
    from robust_ext.evaluations.binarization.forward import Forward
    from robust_ext.evaluations.binarization.problems import measure

    features, _, _ = counted_parts(network, inputs, checked, counter)
    before = counter.forward
    measure(Forward(checked.fitting.measured(features, seed=0), 64), inputs, range(8), checked)
    assert counter.forward - before == planting_cost(checked).forward * 8


@pytest.mark.parametrize(
    ("attacks", "forward", "backward"),
    [
        ([APGD], 11, 10),
        (["robust_ext:APGD(steps=5,restarts=2,loss='margin')"], 12, 10),
        (["robust_ext:ObjectivePGD(steps=7,objective='kl',best=True)"], 9, 7),
        (["robust_ext:SpatialTransformation(mode='random',samples=4)"], 4, 0),
        ([APGD, PGD], 11 + 13, 22),
        (["torchattacks:PGD(steps=6)"], 7, 6),
        (["art:ProjectedGradientDescent(max_iter=6)"], 7, 6),
    ],
)
def test_of_robust_accuracy(given, attacks, forward, backward):
    network, inputs, labels = given
    stated, content = estimate(lambda: robust_ext.robust_accuracy(network, attacks, inputs, labels, THREAT_MODEL))
    # One row an attack to verify what it found.
    assert stated == [8 * (forward + len(attacks)), 8 * backward]
    counted = [sum(one["passes"][way] for one in content["attacks"]) for way in ("forward", "backward")]
    assert counted[0] <= stated[0] <= 1.5 * counted[0]
    assert counted[1] <= stated[1] <= 1.5 * counted[1]


def test_of_a_test_time_defense(given):
    network, inputs, labels = given

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x):
            return self.network(x) + self.network(x.flip(3))

    stated, content = estimate(
        lambda: robust_ext.evaluate_defense(Twice().eval(), APGD, inputs, labels, THREAT_MODEL, classifier=network),
    )
    # Predictions of clean inputs and candidates, and the attack, of which each takes two rows of the static model.
    assert stated == [8 * (4 + 4 + 22), 8 * 20]
    (step,) = content["defended"]["attacks"]
    assert (step["passes"]["forward"], step["passes"]["backward"]) == (8 * 22, 8 * 20)


def test_what_states_no_steps_is_named(given):
    network, inputs, labels = given
    attacks = {"mine": lambda model, x, y: x, "strong": APGD}
    found = robust_ext.estimate(lambda: robust_ext.robust_accuracy(network, attacks, inputs, labels, THREAT_MODEL))
    assert found.total.unknown == ("mine linf 0.1",)


def test_no_number_changes_where_it_is_estimated(given, capsys):
    network, inputs, labels = given
    calls = []
    counting = nn.Sequential(network).eval()
    counting.register_forward_pre_hook(lambda *_: calls.append(None))
    results = [
        robust_ext.robust_accuracy(counting, [APGD], inputs, labels, THREAT_MODEL, progress=shown).content
        for shown in (False, True)
    ]
    assert results[0]["attacks"][0]["robust_accuracy"] == results[1]["attacks"][0]["robust_accuracy"]
    assert results[0]["attacks"][0]["passes"] == results[1]["attacks"][0]["passes"]


def test_seconds_are_measured_at_a_copy_and_only_where_the_module_can_be_run():
    class Kept(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            time.sleep(0.001 * len(x))
            return x.flatten(1)

    module = Kept().eval()
    forward, backward = row_seconds(module, torch.rand(2, 3), 32)
    assert 0.001 <= forward < 0.01
    assert 0 <= backward < forward
    assert module.calls == 0
    flat = nn.Sequential(Kept(), nn.Threshold(2.0, 0.0))
    assert row_seconds(flat, torch.ones(2, 3), 2)[1] >= 0
    assert row_seconds(nn.Linear(4, 2), torch.rand(2, 3), 2) is None
