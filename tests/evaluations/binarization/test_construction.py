"""Problems as the paper defines them: what is planted is there, where it should be, and the same for everyone."""

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

import robust_ext
from robust_ext import ThreatModel, as_attack, binarization_test
from robust_ext.core.target import Counted, PassCounter
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import plant
from robust_ext.evaluations.binarization.attacking import count_planted
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.points import draw_candidates, draw_inner, farthest
from robust_ext.evaluations.binarization.posing import random_reach
from robust_ext.evaluations.binarization.problems import fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import Split, split

THREATS = [ThreatModel(norm=norm, epsilon=size) for norm, size in (("linf", 0.1), ("l2", 0.8), ("l1", 4.0))]


def parts_of(network, inputs):
    found = split(network, inputs[:2])
    return Split(Counted(found.features, PassCounter()), found.readout, found.layer)


def problems_of(network, inputs, settings, forward_batch=64):
    parts = parts_of(network, inputs)
    measured = measure(Forward(parts.features, forward_batch), inputs, range(len(inputs)), settings)
    return parts, measured, fit(measured, parts.readout, settings)


@pytest.mark.parametrize("threat_model", THREATS, ids=lambda t: t.norm)
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


def test_the_boundary_lies_at_kappa(network, digits, linf):
    """Along the direction, an oracle made of the raw features puts it at kappa between the two closest points."""
    settings = BinarizationSettings(threat_model=linf, inner_points=100, boundary_points=3, kappa=0.75)
    parts, measured, problems = problems_of(network, digits[:4], settings)
    module = problems.classifier(parts.features, settings)
    for i in range(4):
        direction = problems.parameters["weight"][i]
        inner = (measured.features[i, :101].double() @ direction).max()
        planted = (measured.features[i, 101:].double() @ direction).min()
        anchor = problems.parameters["anchor"][i] @ direction
        boundary = anchor + module.threshold[i].double()
        assert float((boundary - inner) / (planted - inner)) == pytest.approx(0.75, abs=1e-5)

    # The reference convention starts half way.
    assert replace(settings, kappa_convention="reference").boundary_position == pytest.approx(0.875)


def test_logits_span_the_range_of_the_network(network, digits, linf):
    settings = BinarizationSettings(threat_model=linf, inner_points=100)
    parts, _, problems = problems_of(network, digits[:3], settings)
    for i in range(3):
        points = torch.cat(
            [digits[i : i + 1], draw_inner(digits[i : i + 1], [i], settings, 100)[0], problems.planted[i]]
        )
        module = problems.select([i]).classifier(parts.features, settings)
        with torch.no_grad():
            original, binary = network(points), module(points)
        # The span is symmetric about the middle; its far end is that of the class with the larger margins.
        assert float(binary.max()) == pytest.approx(float(original.max()), rel=1e-4)
        assert float(binary.min()) == pytest.approx(float(original.min()), rel=1e-4)
    assert module.batching == "any"


@pytest.mark.parametrize("threat_model", THREATS, ids=lambda t: t.norm)
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
    for count in (10, 100, 300, 600):
        assert int(corners[:count].sum()) == int(share * count)
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


def test_problems_do_not_depend_on_their_batch(network, digits, linf):
    settings = BinarizationSettings(threat_model=linf, inner_points=200)
    _, _, together = problems_of(network, digits[:6], settings)
    parts = parts_of(network, digits)
    measured = measure(Forward(parts.features, 7), digits[4:5], [4], settings)
    alone = fit(measured, parts.readout, settings)
    assert torch.equal(alone.planted[0], together.planted[4])
    assert float(alone.parameters["weight"][0] @ together.parameters["weight"][4]) == pytest.approx(1, abs=1e-6)


def test_random_attack_agrees_with_brute_force(network, digits, linf):
    """The same points, all of them, through the whole binarized model, give the same hits."""
    settings = BinarizationSettings(threat_model=linf, inner_points=50, random_inner=30, random_corners=50, kappa=0.9)
    parts, _, problems = problems_of(network, digits[:16], settings)
    reach, draws = random_reach(Forward(parts.features, 100), [problems], [0.9], settings)
    seen = {}

    class Recording(nn.Module):
        def forward(self, x):
            seen.setdefault("points", []).append(x)
            return parts.features(x)

    # No position can be reached, so every point is drawn.
    random_reach(Forward(Recording(), 40), [problems], [float("inf")], settings)
    points = torch.cat(seen["points"])
    assert len(points) == 16 * 80
    module = problems.classifier(parts.features, settings)
    with torch.no_grad():
        owner, hit = module.problems(points), module(points).argmax(1) == 1
    assert [int((owner == i).sum()) for i in range(16)] == [80] * 16
    assert [bool(hit[owner == i].any()) for i in range(16)] == (reach[:, 0] > 0.9).tolist()
    assert 0 < int((reach[:, 0] > 0.9).sum()) < 16
    assert all(int(draws[i]) == 80 for i in range(16) if reach[i, 0] <= 0.9)


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


QUICK = {"inner_points": 100}


def test_inputs_are_class_0_and_planted_points_class_1(network, digits, linf):
    planted = plant(network, digits[:20], linf, **QUICK)
    assert planted.samples == tuple(range(20))
    assert torch.equal(planted.inputs, digits[:20])
    assert planted.module(planted.inputs).argmax(1).tolist() == [0] * 20 == planted.labels.tolist()
    assert planted.module(planted.planted[:, 0]).argmax(1).tolist() == [1] * 20
    assert planted.score(planted.planted[:, 0]) == 1.0
    assert planted.score(planted.inputs) == 0.0


def test_the_problems_are_those_of_the_test(network, digits, linf, pgd):
    result = robust_ext.binarization_test(network, pgd(), digits[:12], linf, canaries=0, **QUICK)
    planted = plant(network, digits[:12], linf, **QUICK)
    candidates = pgd()(planted.module, planted.inputs, planted.labels, linf)
    weak = pgd(steps=2, relative_step=0.05)(planted.module, planted.inputs, planted.labels, linf)
    assert planted.score(candidates) == result.content["attacks"][0]["score"]
    assert planted.score(weak) < planted.score(candidates)
    assert planted.verify(weak).outcomes.count("not_adversarial") > 0


def test_a_single_problem_takes_any_points(network, digits, linf):
    planted = plant(network, digits[:6], linf, **QUICK)
    far = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    one = planted.single(2)
    assert (len(one), one.samples) == (1, (2,))
    torch.testing.assert_close(one.module(planted.inputs[2:3]), planted.module(planted.inputs[2:3]))
    assert one.module(far).shape == (40, 2)


def _dark(x):
    """What lies in pixels that should be black: of noise there, little or much."""
    return (x * (x < 0.15)).mean((1, 2, 3))


def _grey(x):
    """The share of values off the grid of clean digits, on which no point of a ball lies."""
    return ((x * 16 - (x * 16).round()).abs() > 1e-4).double().mean((1, 2, 3)) + 1e-3 * x.mean((1, 2, 3)).double()


@pytest.mark.parametrize(
    ("score", "rate", "settings", "plants"),
    [
        (_dark, 0.1, {}, True),
        (_dark, 0.1, {"boundary": "corners", "boundary_points": 2}, True),
        (_grey, 0.1, {}, False),
    ],
)
def test_a_detector_that_rejects_all_gets_settings_that_were_seen_to_plant(score, rate, settings, plants):
    data = load_dataset("digits")
    given = {"detector": score, "detector_data": data.take(range(200, 300))[0], "detector_fpr": rate, "depths": (1,)}
    given |= {"inner_points": 50, "planting_tries": 48, "canaries": 0}
    small = {"random_inner": 5, "random_corners": 5}

    def regular(**changed):
        result = robust_ext.binarization_test(
            digits_network(),
            "robust_ext:APGD(steps=3)",
            data.take(range(12))[0],
            ThreatModel(norm="linf", epsilon=0.1),
            **{**given, **small, **changed},
        )
        return result.content["attacks"][0]["tests"]["regular"]

    attack = regular(**settings)
    assert (attack["samples"], attack["verdict"]) == (0, "inconclusive")
    proposed = re.search(r"To settle it: (.*), which plants (\d+) of 12", attack["reason"])
    assert (proposed is not None) == plants
    if proposed is not None:
        changed = {name: literal_eval(value) for name, value in re.findall(r"(\w+)=([^,]+)", proposed[1])}
        assert regular(**{**settings, **changed})["samples"] == int(proposed[2]) > 0
