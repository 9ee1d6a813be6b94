"""The whole test with every readout and precision, random models by majority, and points at the boundary."""

import copy

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, binarization_test, plant
from robust_ext.core.errors import InconsistentModelError
from robust_ext.demo.network import digits_network
from robust_ext.models.features import split
from robust_ext.models.readouts.catalogue import READOUTS
from robust_ext.models.readouts.linear import KINDS
from robust_ext.registry.readout import as_readout
from tests.evaluations.subjects import random_classifier

SIZES = {"inner_points": 200, "random_inner": 20, "random_corners": 20}
APGD = "robust_ext:APGD(steps=20, loss='margin')"


class Calling(nn.Module):
    """What a function makes of inputs and the module that it calls."""

    def __init__(self, module, function):
        super().__init__()
        self.module, self.function = module, function
        self.eval()

    def forward(self, x):
        return self.function(self.module, x)


def flipped(features, x):
    """Features ``(N, 3, F)`` of several views of an image, as of an ensemble."""
    return torch.stack([features(view) for view in (x, x.flip(3), x.flip(2))], 1)


def mixed(features, x):
    """The same of mixes with fixed others."""
    pattern = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
    return torch.stack([features(0.6 * x + 0.4 * pattern.roll(k, 3)) for k in range(3)], 1)


def subject(network, inputs, text):
    """The digits network as a readout takes it."""
    parts = split(network, inputs[:2])
    if len(as_readout(text).axes) == 1:
        return network
    views = mixed if text == "mixing" else flipped
    return Calling(parts.features, views), Calling(parts.readout, lambda linear, features: linear(features).mean(1))


def noisy(network):
    return Calling(network, lambda network, x: network(x + 0.02 * torch.randn_like(x)))


@pytest.mark.parametrize("text", [*READOUTS, "nearest(k=1)", "ensemble(combine='mean')", "code(decoder='linear')"])
def test_planted_points_survive_batched_and_alone(text, network, digits, linf):
    planted = plant(subject(network, digits, text), digits[:16], linf, readout=text, boundary_points=3, **SIZES)
    assert len(planted) >= 15
    together, alone = [], []
    for points in planted.planted.unbind(1):
        together += planted.verify(points).outcomes
        alone += [planted.single(row).verify(points[row][None]).outcomes[0] for row in range(len(planted))]
    assert min(together.count("found"), alone.count("found")) >= 0.99 * 3 * len(planted)
    assert planted.score(planted.inputs) == 0


@pytest.mark.parametrize("text", READOUTS)
def test_attacks_are_judged(text, network, digits, linf):
    """One that climbs finds more than one that does not move, and every reach fits its outcome."""
    options = {"readout": text, "depths": (1,), "kappa": 0.9 if text == "nearest" else 0.999, "canaries": 2, **SIZES}
    attacks = {"apgd": APGD, "still": lambda model, x, y: x}
    result = binarization_test(subject(network, digits, text), attacks, digits[:12], linf, **options)
    assert result.attacks["still"]["score"] == 0
    assert result.attacks["apgd"]["score"] >= 0.9
    for done in (done for record in result.records for done in record["attacks"].values()):
        assert (done["outcome"] == "found") == (done["reach"] > options["kappa"])


def test_a_random_model_is_judged_by_majorities_and_attacks_are_shown_single_draws(network, digits, linf):
    model, seen = noisy(network), []
    options = {"draws": 9, "depths": (1,), "canaries": 2, **SIZES, "inner_points": 60}

    def still(model, x, y):
        seen.append(torch.equal(model(x), model(x)))
        return x

    result, again = (binarization_test(model, [APGD, still], digits[:12], linf, **options) for _ in range(2))
    assert [one["score"] for one in result.content["attacks"]] == [1, 0]
    assert not any(seen)
    assert all(done["outcome"] != "not_planted" for record in result.records for done in record["attacks"].values())
    assert [record["attacks"] for record in result.records] == [record["attacks"] for record in again.records]
    with pytest.raises(InconsistentModelError, match="is random"):
        binarization_test(model, APGD, digits[:12], linf, **SIZES)


def test_features_may_be_of_several_layers(network, digits, linf):
    linear = ", ".join(name for name, part in network.named_modules() if isinstance(part, nn.Linear))
    assert split(network, digits[:3], layer=linear).shape == (512 + 128,)
    assert binarization_test(network, APGD, digits[:8], linf, layer=linear, depths=(1,), **SIZES).score == 1


def autocast(network):
    return Calling(network, torch.autocast("cpu", dtype=torch.bfloat16)(lambda network, x: network(x)))


FORMS = {"half": nn.Module.half, "bfloat16": nn.Module.bfloat16, "double": nn.Module.double, "autocast": autocast}


@pytest.mark.parametrize("form", FORMS)
def test_in_its_own_precision_a_good_attack_passes_and_a_weak_one_fails(form, digits, linf):
    network = FORMS[form](copy.deepcopy(digits_network()))
    attacks = {"climbing": APGD, "one small step": lambda model, x, y: (x + 0.001).clamp(0, 1)}
    result = binarization_test(
        network, attacks, digits[:6], linf, inner_points=60, planted_candidates=1, depths=(1,), seed=0
    )
    assert result.attacks["climbing"]["score"] == 1
    assert result.attacks["one small step"]["score"] < 0.5
    planted = plant(network, digits[:6], linf, inner_points=60)
    assert planted.samples == tuple(range(6))
    assert (planted.score(planted.planted[:, 0]), planted.score(planted.inputs)) == (1, 0)


NETWORK, INPUTS, _ = random_classifier()


def at_reach(planted, reach):
    """Points of these reaches ``(N,)`` between the inputs and what is planted."""
    low, high = planted.inputs.double(), planted.planted[:, 0].double()
    for _ in range(50):
        middle = (low + high) / 2
        found = planted.problems.reach(planted.features(middle.float()), range(len(planted)))
        beyond = (found > reach).view(-1, 1, 1, 1)
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return low.float()


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.05), ("l2", 0.15), ("l1", 0.4)])
@pytest.mark.parametrize("readout", ["logistic", "max-margin", "nearest", "prototypes"])
@pytest.mark.parametrize("kappa", [0.999, 0.9])
def test_only_points_within_rounding_of_the_boundary_count_as_beyond(norm, epsilon, readout, kappa):
    ball = ThreatModel(norm=norm, epsilon=epsilon)
    planted = plant(NETWORK, INPUTS, ball, readout=readout, kappa=kappa, inner_points=60, planted_candidates=4)
    tolerance = planted.problems.tolerance
    assert bool(((tolerance > 0) & (tolerance <= 5e-4)).all())
    if readout in KINDS:
        # A score is weight . features, and a feature is off by at most 2^-21 of itself.
        weight, features = planted.problems.parameters["weight"], planted.features(planted.planted[:, 0]).double()
        shift = 2**-21 * (weight * features).abs().sum(1) / planted.problems.gap
        torch.testing.assert_close(tolerance, shift.clamp(max=5e-4), rtol=1e-3, atol=0)
        assert bool((shift < 5e-4).any())
    assert planted.score(at_reach(planted, kappa - tolerance / 2)) == 1
    assert planted.score(at_reach(planted, kappa - 2 * tolerance)) == 0
