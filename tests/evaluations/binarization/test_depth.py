"""Deeper problems: posed exactly where a verified point proves them solvable, by brute force over all corners."""

import itertools

import pytest
import torch
from torch import nn

from robust_ext import as_attack
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization import BinarizationSettings, binarization_test, plant
from robust_ext.evaluations.binarization.defense import Defense
from robust_ext.evaluations.binarization.depth_scores import find_behind, score_depths, solved_depth
from robust_ext.evaluations.binarization.witnesses import find_witnesses
from robust_ext.models.features import split
from tests.evaluations.subjects import Pattern, gradient

LINF = ThreatModel(norm="linf", epsilon=0.1)
TINY = {"inner_points": 20, "depths": (1, 1.25, 1.5, 4, 8), "canaries": 0, "seed": 3, "boundary": "surface"}
TINY |= {"witness_steps": 10, "witness_queries": 30, "planted_candidates": 1, "inner": 0.5}
APGD = "APGD-MARGIN"


@pytest.fixture(scope="module")
def linear():
    """A linear model of six values, so that the deepest point of a ball clipped to the bounds is one of its corners."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(10, 1, 2, 3, generator=generator)
    inputs[3:] = inputs[3:].round().clamp(0.03, 1)
    readout = nn.Linear(6, 3)
    nn.init.normal_(readout.weight, generator=generator)
    return (nn.Flatten().eval(), readout.eval()), inputs


def deepest_corners(problems):
    """The largest reach over the 2^6 corners of each clipped ball, and the corner."""
    best, points = {}, []
    choices = torch.tensor(list(itertools.product((0.0, 1.0), repeat=6)))
    for row, x in enumerate(problems.inputs):
        low, high = (x - 0.1).clamp_min(0).flatten(), (x + 0.1).clamp_max(1).flatten()
        corners = low + choices * (high - low)
        reach = problems.reach(corners, [row] * len(corners))
        best[problems.samples[row]] = float(reach.max())
        points.append(corners[int(reach.argmax())].view_as(x))
    return best, torch.stack(points)


def sign_step(model, x, y, threat_model):
    """The deepest point of a linear model."""
    return (x + threat_model.epsilon * gradient(model, x, y).sign()).clamp(0, 1)


def stops_early(model, x, y, threat_model):
    """The first adversarial point on the way there, of a hundred."""
    end, found = sign_step(model, x, y, threat_model), x.clone()
    for step in range(101):
        open_rows = (model(found).argmax(1) == y).view(-1, 1, 1, 1)
        found = torch.where(open_rows, x + step / 100 * (end - x), found)
    return found


def test_posed_where_brute_force_finds_a_deeper_corner(linear):
    model, inputs = linear
    brute, _ = deepest_corners(plant(model, inputs, LINF, **TINY).problems)
    attacks = {"sign": sign_step, "early": stops_early, "nothing": lambda model, x, y: x}
    result, early = binarization_test(model, attacks, inputs, LINF, **TINY), []
    for record in result.records:
        deepest, entries = brute[record["sample"]], record["attacks"]
        assert record["witnesses"][APGD] == pytest.approx(deepest, rel=1e-4)
        assert (record["witnesses"]["Square"] or 0.0) <= deepest * (1 + 1e-6)
        assert entries["sign"]["deepest"] == pytest.approx(deepest, rel=1e-4)
        for name in ("sign", "early"):
            assert [row["depth"] for row in entries[name]["depths"]] == [d for d in TINY["depths"][1:] if deepest > d]
            assert {row["outcome"] for row in entries[name]["depths"]} <= {"found"}
        assert "depths" not in entries["nothing"], "an attack that fails is not posed deeper problems"
        early += [entries["early"]] if deepest > 3 else []
    assert early
    for entry in early:
        assert 1 < entry["reach"] < 1.5 < entry["deepest"], "the test itself shows nothing of deeper problems"
    proved = [sum(reach > depth for reach in brute.values()) for depth in TINY["depths"][1:]]
    assert [row["proved"] for row in result.content["witnesses"]] == proved
    assert proved[0] > proved[2] > 0
    assert result.attacks["nothing"]["depth"] is None
    assert result.attacks["sign"]["depth"] == result.attacks["sign"]["depths"][-1]["depth"]


def test_a_reach_that_does_not_verify_proves_nothing(linear):
    """Points out of the ball or the bounds lie deep, and are no witnesses."""
    model, inputs = linear
    _, corners = deepest_corners(plant(model, inputs, LINF, **TINY).problems)
    far = {
        "beyond_epsilon": (inputs + 3 * (corners - inputs)).clamp(0, 1),
        "out_of_bounds": corners + torch.where(inputs > 0.5, 3.0, -3.0),
    }
    attacks = {name: lambda model, x, y, points=points: points for name, points in far.items()}
    result = binarization_test(model, attacks, inputs, LINF, **{**TINY, "witness_steps": 0, "witness_queries": 0})
    outcomes = {entry["outcome"] for record in result.records for entry in record["attacks"].values()}
    assert outcomes == {"beyond_epsilon", "out_of_bounds"}
    assert [row["proved"] for row in result.content["witnesses"]] == [0] * 4
    assert all(len(attack["depths"]) == 1 for attack in result.attacks.values())


@pytest.mark.parametrize("inverted", [False, True])
def test_witnesses_are_not_rejected(network, digits, linf, inverted):
    detector = Pattern(network)
    detector.calibrate(digits[32:], false_positive_rate=0.3)
    defense = Defense(detector=detector, inverted=inverted)
    problems = plant(network, digits[:8], linf, inner_points=60).problems
    settings, features = BinarizationSettings(threat_model=linf), split(network, digits[:2]).features
    (witness,) = find_witnesses(Counted(features, PassCounter()), problems, settings, defense=defense)
    blind, smooth, square = find_witnesses(features, problems, settings)
    assert (witness.name, blind.name, square.name) == (APGD, APGD, "Square")
    assert smooth.name.startswith(f"{APGD} through")
    assert len(square.reach) == len(problems.samples), "it begins at the planted point"
    assert len(witness.reach) >= 4
    clean = dict(zip(problems.samples, problems.inputs, strict=True))
    for sample, point in witness.points.items():
        assert not bool(defense.rejects(point[None], seed=0))
        assert bool(linf.contains(point[None], clean[sample][None]))
        assert witness.reach[sample] > 0.999


def test_a_faster_copy_is_searched_and_the_network_itself_verifies(linear):
    """The deepest corner of a copy of other weights, and how deep it lies for the network."""
    (features, readout), inputs = linear
    problems = plant((features, readout), inputs, LINF, **TINY).problems
    halved = nn.Sequential(nn.Flatten(), nn.Linear(6, 6, bias=False)).requires_grad_(False).eval()
    halved[1].weight.copy_(torch.diag(torch.tensor([1.0, 1, 1, 0, 0, 0])))
    witness = next(find_witnesses(features, problems, BinarizationSettings(threat_model=LINF, **TINY), searched=halved))
    best, _ = deepest_corners(problems)
    rows = [problems.samples.index(sample) for sample in witness.reach]
    found = torch.stack([witness.points[sample] for sample in witness.reach])
    assert problems.reach(found.flatten(1), rows).tolist() == pytest.approx(list(witness.reach.values()), rel=1e-4)
    assert all(reach <= best[sample] * (1 + 1e-4) for sample, reach in witness.reach.items())
    assert any(reach < 0.99 * best[sample] for sample, reach in witness.reach.items())


def left(outcome="found", *, deepest=None, depths=(), **witnesses):
    """The record of one sample attacked by "mine"."""
    entry = {"outcome": outcome, "deepest": deepest, "depths": [{"depth": d, "outcome": o} for d, o in depths]}
    other = {"outcome": "found", "deepest": witnesses.pop("other", None), "depths": []}
    return {"attacks": {"mine": entry, "other": other}, "random_reach": 0.5, "witnesses": witnesses}


def finding_of(records, rows, settings):
    entry = {"name": "mine", "depth": solved_depth(rows, settings), "depths": rows}
    return find_behind(entry, records, {"mine": as_attack("robust_ext:APGD(steps=5)")}, settings)


SOLVED = left(deepest=3.0, depths=[(2.0, "found")], square=2.5)
MISSED = left(deepest=1.5, depths=[(2.0, "not_adversarial")], apgd=3.0, other=2.2)
ALONE = left(deepest=2.5, depths=[(2.0, "found")])


@pytest.mark.parametrize(
    ("records", "by_others", "depth", "behind"),
    [
        ([SOLVED] * 12, (12, 12), 2.0, False),
        ([SOLVED] * 2 + [MISSED] * 12, (14, 2), 1.0, True),
        ([SOLVED] * 60 + [MISSED] * 4, (64, 60), 1.0, False),
        ([SOLVED] * 32 + [MISSED] * 32, (64, 32), 1.0, True),
        # What only the attack itself proves does not count for it.
        ([ALONE] * 30 + [MISSED] * 12, (12, 0), 1.0, True),
        ([MISSED], (1, 0), 1.0, False),
        ([left("not_adversarial")] * 3 + [MISSED] * 12, (12, 0), None, False),
    ],
)
def test_who_falls_behind(records, by_others, depth, behind):
    settings = BinarizationSettings(threat_model=LINF, depths=(1, 2))
    rows = score_depths("mine", records, settings)
    assert tuple(rows[1][key] for key in ("problems_by_others", "found_by_others")) == by_others
    assert solved_depth(rows, settings) == depth
    finding = finding_of(records, rows, settings)
    assert (finding is not None) == behind
    # The witness, and the share of what it finds at depth 2.
    assert finding is None or (finding.code == "falls_behind" and "apgd" in finding.cause and "0%" in finding.cause)


UNPLANTED, INSEPARABLE = {"outcome": "not_planted"}, {"attacks": {}, "random_reach": None, "separable": False}
BOTH = left(deepest=5.0, depths=[(2.0, "found"), (4.0, "found")], **{APGD: 5.0})
LESS = left(deepest=3.0, depths=[(2.0, "found"), (4.0, "not_adversarial")], **{APGD: 5.0})
MORE = left(deepest=5.0, depths=[(2.0, "found"), (4.0, "found")], other=5.0, **{APGD: 3.0})
SMOOTH = left(deepest=3.0, depths=[(2.0, "found"), (4.0, "not_adversarial")], **{f"{APGD} through EoT": 5.0})


@pytest.mark.parametrize(
    ("records", "behind"),
    [
        ([BOTH] * 64, False),
        ([BOTH] * 23 + [LESS] * 5, True),  # An attack that is as good is that much worse in one of 32 runs.
        ([BOTH] * 24 + [LESS] * 4, False),
        ([BOTH] * 190 + [LESS] * 6, False),  # Beyond chance, and above the threshold.
        ([BOTH] * 40 + [LESS] * 14 + [MORE] * 1, True),
        ([BOTH] * 40 + [SMOOTH] * 9, False),  # What no plain APGD finds takes more than a fifth.
        ([BOTH] * 10 + [SMOOTH] * 30, True),
        ([left("not_planted")] * 20 + [BOTH] * 40 + [LESS] * 2, False),
        ([INSEPARABLE] * 3 + [left("not_planted")] + [BOTH] * 42 + [LESS] * 14, True),
    ],
)
@pytest.mark.parametrize("sequential", [False, True])
def test_it_keeps_up_with_plain_apgd_or_that_is_said(records, behind, sequential):
    settings = BinarizationSettings(threat_model=LINF, depths=(1, 2, 4), sequential=sequential)
    planted = [record for record in records if record["attacks"].get("mine", UNPLANTED)["outcome"] == "found"]
    assert (finding_of(records, score_depths("mine", planted, settings), settings) is not None) == behind
