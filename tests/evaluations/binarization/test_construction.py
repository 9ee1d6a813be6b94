"""Problems as the paper defines them: what is planted is there, where it should be, and the same for everyone."""

import copy
import math
import re
from ast import literal_eval
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance
from torch import nn
from torch.nn import functional as F

from robust_ext import ThreatModel, as_attack, binarization_test, plant
from robust_ext.core.errors import InconsistentModelError
from robust_ext.core.target import Counted, PassCounter
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization.attacking import count_planted
from robust_ext.evaluations.binarization.forward import Forward, choose_forward, folded_twin
from robust_ext.evaluations.binarization.points import draw_candidates, draw_inner, farthest
from robust_ext.evaluations.binarization.posing import random_reach
from robust_ext.evaluations.binarization.problems import _further_draws, fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import LayerInput, Split, split
from robust_ext.models.readouts.catalogue import READOUTS
from robust_ext.models.readouts.linear import KINDS
from robust_ext.registry.readout import as_readout
from tests.evaluations.subjects import random_classifier

THREATS = [ThreatModel(norm=norm, epsilon=size) for norm, size in (("linf", 0.1), ("l2", 0.8), ("l1", 4.0))]
EACH_NORM = pytest.mark.parametrize("threat_model", THREATS, ids=lambda t: t.norm)


def parts_of(network, inputs):
    found = split(network, inputs[:2])
    return Split(Counted(found.features, PassCounter()), found.readout, found.layer)


def problems_of(network, inputs, settings, forward_batch=64):
    parts = parts_of(network, inputs)
    measured = measure(Forward(parts.features, forward_batch), inputs, range(len(inputs)), settings)
    return parts, measured, fit(measured, parts.readout, settings)


@EACH_NORM
@pytest.mark.parametrize("boundary_points", [1, 10])
@pytest.mark.parametrize("kappa", [0.0, 0.9999])
def test_planted_points_survive_the_whole_model(network, digits, threat_model, boundary_points, kappa):
    sizes = {"inner_points": 300, "boundary_points": boundary_points}
    settings = BinarizationSettings(threat_model=threat_model, kappa=kappa, **sizes)
    parts, _, problems = problems_of(network, digits[:16], settings)
    rows = [row for row in range(16) if problems.separable[row]]
    assert len(rows) >= 15
    posed = problems.select(rows)
    module = posed.classifier(parts.features, settings, batching="full")
    assert int(count_planted(module, posed).sum()) >= 0.99 * len(rows) * boundary_points


def test_the_boundary_lies_at_kappa_and_logits_span_the_range_of_the_network(network, digits, linf):
    """Along the direction, an oracle made of the raw features puts it at kappa between the two closest points."""
    settings = BinarizationSettings(threat_model=linf, inner_points=100, boundary_points=3, kappa=0.75)
    parts, measured, problems = problems_of(network, digits[:4], settings)
    module = problems.classifier(parts.features, settings)
    for i in range(4):
        direction, features = problems.parameters["weight"][i], measured.features[i].double()
        inner, planted = (features[:101] @ direction).max(), (features[101:] @ direction).min()
        boundary = problems.parameters["anchor"][i] @ direction + module.threshold[i].double()
        assert float((boundary - inner) / (planted - inner)) == pytest.approx(0.75, abs=1e-5)
        points = torch.cat([digits[i][None], draw_inner(digits[i][None], [i], settings, 100)[0], problems.planted[i]])
        alone = problems.select([i]).classifier(parts.features, settings)
        original, binary = network(points).detach(), alone(points).detach()
        # The span is symmetric about the middle; its far end is that of the class with the larger margins.
        torch.testing.assert_close(binary.aminmax(), original.aminmax(), rtol=1e-4, atol=0)
    assert alone.batching == "any"
    # The reference convention starts half way.
    assert replace(settings, kappa_convention="reference").boundary_position == pytest.approx(0.875)


@EACH_NORM
@pytest.mark.parametrize(("inner", "share"), [("uniform", 0.0), (0.3, 0.3), (1.0, 1.0)])
def test_a_share_of_the_inner_points_are_corners_of_the_smaller_ball(digits, threat_model, inner, share):
    settings = BinarizationSettings(threat_model=threat_model, inner=inner, gap=0.2, boundary="corners")
    points = draw_inner(digits[3:4], [3], settings, 600)[0]
    assert ((points >= 0) & (points <= 1)).all()
    clean = digits[3].expand_as(points)
    assert (threat_model.distance(points, clean) <= 0.8 * threat_model.epsilon + 1e-5).all()
    # A corner moves few values, or all alike where they are not clipped; the moves of a uniform point all differ.
    moves = (points - clean).abs().flatten(1)
    corners = torch.tensor([len(move[move > 1e-6].mul(1e4).round().unique()) < 20 for move in moves])
    assert [int(corners[:count].sum()) for count in (10, 100, 600)] == [int(share * count) for count in (10, 100, 600)]
    # Uniform points in l1 and l2 are as long as those on the surface.
    surface = replace(settings, boundary="surface").inner_corners
    assert surface == (share if threat_model.norm == "linf" else 0)


@pytest.mark.parametrize("inner", ["uniform", 0.3, 1.0])
def test_points_do_not_depend_on_batch_order_or_number(digits, linf, inner):
    settings = BinarizationSettings(threat_model=linf, inner_points=600, inner=inner)
    many = draw_inner(digits[2:5], [2, 3, 4], settings, 600)
    alone = torch.cat([draw_inner(digits[3:4], [3], settings, 7, start=start) for start in range(0, 350, 7)], 1)
    assert torch.equal(alone, many[1:2, :350])
    assert not torch.equal(draw_inner(digits[3:4], [4], settings, 300), many[1:2, :300])
    candidates = draw_candidates(digits[2:5], [2, 3, 4], replace(settings, boundary_points=5))
    few = draw_candidates(digits[3:4], [3], settings)
    assert torch.equal(few, candidates[1:2, : settings.planted_candidates])


@pytest.mark.parametrize("features", [(3,), (2, 40)])
def test_what_is_planted_is_farthest_from_the_inner_points(features):
    """Against scikit-learn, where inner points are more than features, and fewer."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(0.5, 2, math.prod(features)).view(features)
    inner, candidates = (scales * torch.randn(n, *features, generator=generator) for n in (50, 12))
    rows = inner.flatten(1).double().numpy()
    oracle = EmpiricalCovariance().fit(rows)
    floor = 1e-3 * (rows - rows.mean(0)).var() * np.eye(rows.shape[1])
    apart = candidates.flatten(1).double().numpy() - oracle.location_
    distances = np.einsum("if,fg,ig->i", apart, np.linalg.inv(oracle.covariance_ + floor), apart)
    # Beside a problem in which nothing varies.
    inner, candidates = torch.stack([inner, torch.zeros_like(inner)]), torch.stack([candidates] * 2)
    plain = candidates[1].flatten(1).square().sum(1)
    for count, ends in ((1, [0, 12]), (3, [0, 4, 8, 12]), (5, [0, 3, 6, 8, 10, 12]), (12, range(13))):
        expected = [[a + int(far[a:b].argmax()) for a, b in pairwise(ends)] for far in (distances, plain)]
        assert farthest(inner, candidates, count).tolist() == expected


def test_given_candidates_differ_in_number_and_points_of_random_models_are_drawn_seven_times_more(digits, linf):
    settings, forward = BinarizationSettings(threat_model=linf, inner_points=9), Forward(nn.Flatten(), 256)
    given = [draw_candidates(digits[:1], [0], settings)[0, :5], draw_candidates(digits[1:2], [1], settings)[0, 5:8]]
    planted = measure(forward, digits[:2], range(2), settings, candidates=given).planted
    assert all(bool((one == own).flatten(1).all(1).any()) for one, own in zip(planted, given, strict=True))
    again = _further_draws(Forward(nn.Flatten(2), 256), planted)
    assert torch.equal(again, planted.flatten(2)[:, :, None].expand(2, 1, 7, 64))


def test_random_attack_agrees_with_brute_force(network, digits, linf):
    """The same points, all of them, through the whole binarized model, give the same hits."""
    settings = BinarizationSettings(threat_model=linf, inner_points=50, random_inner=30, random_corners=50, kappa=0.9)
    parts, _, problems = problems_of(network, digits[:16], settings)
    reach, draws = random_reach(Forward(parts.features, 100), [problems], [0.9], settings)
    seen, recording = [], split(network, digits[:2]).features
    recording.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    # No position can be reached, so every point is drawn.
    random_reach(Forward(recording, 40), [problems], [float("inf")], settings)
    points, module = torch.cat(seen), problems.classifier(parts.features, settings)
    owner, hit = module.problems(points), module(points).argmax(1) == 1
    assert [int((owner == i).sum()) for i in range(16)] == [80] * 16
    found = reach[:, 0] > 0.9
    assert [bool(hit[owner == i].any()) for i in range(16)] == found.tolist()
    assert 0 < int(found.sum()) < 16
    assert all(int(draws[i]) == 80 for i in range(16) if not found[i])


def test_random_search_of_the_attacks_own_effort(network, digits, linf):
    """As many points as the attack with most queries, in the given proportion; the test is that with as many fixed."""
    small = {"inner_points": 60, "random_inner": 30, "random_corners": 10, "canaries": 0, "depths": (1,)}
    attacks = {name: as_attack(f"robust_ext:APGD(steps={steps})") for name, steps in (("short", 5), ("long", 15))}
    matched = binarization_test(network, attacks, digits[:4], linf, random="match", **small)
    # 15 steps, and the last point's loss.
    settings = matched.content["settings"]
    assert (settings["random_inner"], settings["random_corners"]) == (12, 4)
    same = binarization_test(network, attacks, digits[:4], linf, **{**small, "random_inner": 12, "random_corners": 4})
    assert [one["random_reach"] for one in matched.records] == [one["random_reach"] for one in same.records]
    # What an attack does not state cannot be matched.
    own = binarization_test(network, lambda model, x, y: x, digits[:4], linf, random="match", **small)
    assert own.content["settings"]["random_inner"] == 30


# Points measured through a folded copy: the same features, or the network itself; and without waiting for a GPU.


class Residual(nn.Module):
    """Functional calls, a skip and batch normalisation with statistics of its own."""

    def __init__(self, width=32):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
            self.second, self.other = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
            self.head = nn.Linear(width, 4)
            with torch.no_grad():
                for norm in (self.norm, self.other):
                    norm.running_mean.normal_()
                    norm.running_var.uniform_(0.5, 2)
                    norm.weight.uniform_(0.5, 2)
        self.eval()

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.other(self.second(x)) + x)
        return self.head(x.mean((2, 3)))


class DataDependent(Residual):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class Noisy(Residual):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class Shared(Residual):
    """One convolution called twice, once before a normalisation: folding it would change the other call."""

    def forward(self, x):
        x = self.norm(self.second(F.relu(self.first(x))))
        return self.head(F.relu(self.second(x)).mean((2, 3)))


class Branching(Residual):
    """What others read is not written over, nor the inputs, and what dropout passes on as it is."""

    def forward(self, x):
        moved = F.dropout(x, training=False) + x.mean((2, 3), keepdim=True)
        y = self.norm(self.first(F.relu(F.dropout(x * moved - 0.5, training=False))))
        z = self.second(F.relu(y))
        return self.head((F.relu(z) * z + F.relu(y + z) + y).mean((2, 3)))


@pytest.mark.parametrize(("kind", "norms"), [(Residual, 0), (Shared, 1), (Branching, 0)])
def test_the_copy_gives_the_same_features_and_is_counted(kind, norms):
    network, inputs = kind(), torch.rand(5, 3, 10, 10)
    features, kept = Counted(LayerInput(network, "head"), PassCounter()), inputs.clone()
    twin, before = folded_twin(features, inputs), features.counter.snapshot()
    got = Forward(twin.module, 2, twin.channels_last)(inputs)
    assert features.counter.since(before) == PassCounter(5, 0)
    torch.testing.assert_close(got, features(inputs), rtol=1e-5, atol=1e-5)
    assert torch.equal(inputs, kept)
    assert sum(isinstance(part, nn.BatchNorm2d) for part in twin.module.modules()) == norms
    assert sum(isinstance(part, nn.BatchNorm2d) for part in network.modules()) == 2
    if kind is Branching:
        targets = [node.target for node in twin.module.module.model.graph.nodes]
        assert (targets.count(torch.relu_), targets.count(F.relu)) == (1, 3)


@pytest.mark.parametrize("kind", [DataDependent, Noisy])
def test_what_cannot_be_folded_is_measured_as_it_is(kind):
    features = Counted(LayerInput(kind(), "head"), PassCounter())
    assert folded_twin(features, torch.rand(2, 3, 10, 10)) is None
    forward = choose_forward(features, torch.rand(2, 3, 10, 10), rows=16, fold=True)
    assert (forward.module, forward.rows, forward.channels_last) == (features, 16, False)


# The whole test with every readout and precision, random models by majority, and points at the boundary.
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


def views(features, x):
    """Features ``(N, 3, F)`` of mixes of an image with fixed others, as of an ensemble."""
    pattern = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
    return torch.stack([features(0.6 * x + 0.4 * pattern.roll(k, 3)) for k in range(3)], 1)


def subject(network, inputs, text):
    """The digits network as a readout takes it."""
    parts = split(network, inputs[:2])
    if len(as_readout(text).axes) == 1:
        return network
    return Calling(parts.features, views), Calling(parts.readout, lambda linear, features: linear(features).mean(1))


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


def test_problems_do_not_depend_on_their_batch(network, digits, linf):
    settings = BinarizationSettings(threat_model=linf, inner_points=200)
    parts, _, together = problems_of(network, digits[:6], settings)
    alone = fit(measure(Forward(parts.features, 7), digits[4:5], [4], settings), parts.readout, settings)
    assert torch.equal(alone.planted[0], together.planted[4])
    assert float(alone.parameters["weight"][0] @ together.parameters["weight"][4]) == pytest.approx(1, abs=1e-6)


def _dark(x):
    """What lies in pixels that should be black: of noise there, little or much."""
    return (x * (x < 0.15)).mean((1, 2, 3))


def _grey(x):
    """The share of values off the grid of clean digits, on which no point of a ball lies."""
    return ((x * 16 - (x * 16).round()).abs() > 1e-4).double().mean((1, 2, 3)) + 1e-3 * x.mean((1, 2, 3)).double()


@pytest.mark.parametrize(
    ("score", "settings", "plants"),
    [(_dark, {}, True), (_dark, {"boundary": "corners", "boundary_points": 2}, True), (_grey, {}, False)],
)
def test_a_detector_that_rejects_all_gets_settings_that_were_seen_to_plant(linf, score, settings, plants):
    data, given = load_dataset("digits"), {"detector": score, "detector_fpr": 0.1, "depths": (1,), "canaries": 0}
    given |= {"inner_points": 50, "planting_tries": 48, "random_inner": 5, "random_corners": 5}
    given["detector_data"] = data.take(range(200, 300))[0]

    def regular(**changed):
        run = digits_network(), "robust_ext:APGD(steps=3)", data.take(range(12))[0], linf
        return binarization_test(*run, **{**given, **settings, **changed}).content["attacks"][0]["tests"]["regular"]

    attack = regular()
    assert (attack["samples"], attack["verdict"]) == (0, "inconclusive")
    proposed = re.search(r"To settle it: (.*), which plants (\d+) of 12", attack["reason"])
    assert (proposed is not None) == plants
    if proposed is not None:
        changed = {name: literal_eval(value) for name, value in re.findall(r"(\w+)=([^,]+)", proposed[1])}
        assert regular(**changed)["samples"] == int(proposed[2]) > 0


def noisy(network):
    return Calling(network, lambda network, x: network(x + 0.02 * torch.randn_like(x)))


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
