"""The whole test with every readout and precision, random models by majority, and points at the boundary."""

import copy

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, binarization_test, plant
from robust_ext.core.devices import precision_of, tolerance_of
from robust_ext.core.errors import InconsistentModelError, RunFolderError
from robust_ext.demo.network import digits_network
from robust_ext.models.features import split
from robust_ext.models.readouts.catalogue import READOUTS
from robust_ext.models.readouts.linear import KINDS
from robust_ext.registry.readout import as_readout
from tests.evaluations.subjects import random_classifier

SIZES = {"inner_points": 200, "random_inner": 20, "random_corners": 20}


class Views(nn.Module):
    """Features ``(N, 3, F)`` of several views of an image, as of an ensemble, or of mixes with fixed others."""

    def __init__(self, features, *, mixing):
        super().__init__()
        self.features, self.mixing = features, mixing
        self.eval()

    def forward(self, x):
        pattern = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
        views = [0.6 * x + 0.4 * pattern.roll(k, 3) for k in range(3)] if self.mixing else [x, x.flip(3), x.flip(2)]
        return torch.stack([self.features(view) for view in views], 1)


class Head(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.eval()

    def forward(self, features):
        return self.linear(features).mean(1)


def subject(network, inputs, text):
    """The digits network as a readout takes it."""
    parts = split(network, inputs[:2])
    if len(as_readout(text).axes) == 1:
        return network
    return Views(parts.features, mixing=text == "mixing"), Head(parts.readout)


class Noisy(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x):
        return self.network(x + 0.02 * torch.randn_like(x))


@pytest.mark.parametrize("text", [*READOUTS, "nearest(k=1)", "ensemble(combine='mean')", "code(decoder='linear')"])
def test_planted_points_survive_batched_and_alone(text, network, digits, linf):
    planted = plant(subject(network, digits, text), digits[:16], linf, readout=text, boundary_points=3, **SIZES)
    assert len(planted) >= 15
    found = together = 0
    for number in range(3):
        points = planted.planted[:, number]
        together += planted.verify(points).outcomes.count("found")
        alone = [planted.single(row).verify(points[row][None]).outcomes[0] for row in range(len(planted))]
        found += alone.count("found")
    assert min(found, together) >= 0.99 * 3 * len(planted)
    assert planted.score(planted.inputs) == 0


@pytest.mark.parametrize("text", READOUTS)
def test_attacks_are_judged(text, network, digits, linf):
    """One that climbs finds more than one that does not move, and every reach fits its outcome."""
    kappa = 0.9 if text == "nearest" else 0.999
    options = {"readout": text, "depths": (1,), "kappa": kappa, "canaries": 2, **SIZES}
    attacks = {"apgd": "robust_ext:APGD(steps=20, loss='margin')", "still": lambda model, x, y: x}
    result = binarization_test(subject(network, digits, text), attacks, digits[:12], linf, **options)
    scores = {entry["name"]: entry["score"] for entry in result.content["attacks"]}
    assert scores["still"] == 0
    assert scores["apgd"] >= 0.9
    for record in result.records:
        for done in record["attacks"].values():
            assert (done["outcome"] == "found") == (done["reach"] > kappa)


def test_a_random_model_is_judged_by_majorities(network, digits, linf):
    noisy, options = Noisy(network), {"draws": 9, "depths": (1,), "canaries": 2, **SIZES, "inner_points": 60}
    attack = "robust_ext:APGD(steps=20, loss='margin')"
    result = binarization_test(noisy, [attack, lambda model, x, y: x], digits[:12], linf, **options)
    climbing, still = result.content["attacks"]
    assert (climbing["score"], still["score"]) == (1, 0)
    assert all(done["outcome"] != "not_planted" for record in result.records for done in record["attacks"].values())
    again = binarization_test(noisy, attack, digits[:12], linf, **options)
    first = [record["attacks"][climbing["name"]] for record in result.records]
    assert first == [record["attacks"][climbing["name"]] for record in again.records]
    with pytest.raises(InconsistentModelError, match="is random"):
        binarization_test(noisy, attack, digits[:12], linf, **SIZES)


def test_attacks_are_shown_single_draws(network, digits, linf):
    seen = []

    def attack(model, x, y):
        seen.append((model(x), model(x)))
        return x

    binarization_test(Noisy(network), attack, digits[:4], linf, draws=3, depths=(1,), canaries=0, **SIZES)
    (first, second), *_ = seen
    assert not torch.equal(first, second)


def test_features_may_be_methods_and_of_several_layers(network, digits, linf):
    linear = ", ".join(name for name, part in network.named_modules() if isinstance(part, nn.Linear))
    assert split(network, digits[:3], layer=linear).shape == (512 + 128,)
    parts = split(network, digits[:2])

    def run(model, **more):
        attack = "robust_ext:APGD(steps=20, loss='margin')"
        return binarization_test(model, attack, digits[:8], linf, depths=(1,), **SIZES, **more)

    assert run(network, layer=linear).score == 1
    by_pair, whole = run((lambda x: parts.features(x), parts.readout)), run(network)
    assert [r["attacks"] for r in by_pair.records] == [r["attacks"] for r in whole.records]


def test_another_readout_is_refused_in_the_same_folder(tmp_path, network, digits, linf):
    file = tmp_path / "own.py"
    base = "from robust_ext.models.readouts.linear import Logistic\n\nclass Own(Logistic):\n    factor = {}\n"
    options = {"out": tmp_path / "run", "depths": (1,), "readout": f"{file}:Own", **SIZES}
    file.write_text(base.format(1))
    first, again = (binarization_test(network, lambda model, x, y: x, digits[:4], linf, **options) for _ in range(2))
    assert again == first
    file.write_text(base.format(2))
    with pytest.raises(RunFolderError):
        binarization_test(network, lambda model, x, y: x, digits[:4], linf, **options)


LINF = ThreatModel(norm="linf", epsilon=0.1)


SETTINGS = {"inner_points": 60, "planted_candidates": 1, "depths": (1,), "seed": 0}


class Autocast(nn.Module):
    """A network under autocast."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.network(x)


FORMS = {"half": nn.Module.half, "bfloat16": nn.Module.bfloat16, "double": nn.Module.double, "autocast": Autocast}


@pytest.mark.parametrize("form", FORMS)
def test_in_its_own_precision_a_good_attack_passes_and_a_weak_one_fails(form, digits):
    network = FORMS[form](copy.deepcopy(digits_network()))
    attacks = {
        "climbing": "robust_ext:APGD(steps=20, loss='margin')",
        "one small step": lambda model, x, y: (x + 0.001).clamp(0, 1),
    }
    result = binarization_test(network, attacks, digits[:6], LINF, **SETTINGS)
    scores = {entry["name"]: entry["score"] for entry in result.content["attacks"]}
    assert scores["climbing"] == 1
    assert scores["one small step"] < 0.5
    planted = plant(network, digits[:6], LINF, inner_points=60)
    assert planted.samples == tuple(range(6))
    assert planted.score(planted.planted[:, 0]) == 1
    assert planted.score(planted.inputs) == 0


def test_tolerances_follow_from_the_coarsest_type():
    layers = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2))
    assert tolerance_of(layers, single=1e-4) == 1e-4
    layers[0].half()
    assert precision_of(layers) == torch.float16
    assert tolerance_of(layers, single=1e-4) == pytest.approx(16 * 2**-10)
    assert tolerance_of(layers, torch.zeros(1, dtype=torch.bfloat16), single=1e-4) == pytest.approx(16 * 2**-7)


NETWORK, INPUTS, _ = random_classifier()


EPSILONS = {"linf": 0.05, "l2": 0.15, "l1": 0.4}


def at_reach(planted, reach):
    """Points of these reaches ``(N,)`` between the inputs and what is planted."""
    problems, index = planted.problems, range(len(planted))
    low, high = planted.inputs.double(), planted.planted[:, 0].double()
    for _ in range(50):
        middle = (low + high) / 2
        beyond = (problems.reach(planted.features(middle.float()), index) > reach).view(-1, 1, 1, 1)
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return low.float()


@pytest.mark.parametrize("norm", EPSILONS)
@pytest.mark.parametrize("readout", ["logistic", "max-margin", "nearest", "prototypes"])
@pytest.mark.parametrize("kappa", [0.999, 0.9])
def test_only_points_within_rounding_of_the_boundary_count_as_beyond(norm, readout, kappa):
    ball = ThreatModel(norm=norm, epsilon=EPSILONS[norm])
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
