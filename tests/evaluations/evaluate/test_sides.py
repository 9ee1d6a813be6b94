"""Evaluations of what is no plain classifier: random models, test-time defenses, detectors."""

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.evaluate import certificate as certificates
from robust_ext.evaluations.evaluate.certificate import ERROR_RATE, draws_to_plant
from robust_ext.evaluations.evaluate.settings import EvaluateSettings
from robust_ext.evaluations.run_keywords import RunKeywords
from robust_ext.registry.attack import as_attack
from robust_ext.registry.defense import as_defense

NETWORK = digits_network().requires_grad_(False)
INPUTS, LABELS = load_dataset("digits").take(range(8))
WIDE = ThreatModel(norm="linf", epsilon=0.25)
AWARE = {"OrthogonalPGD", "SelectivePGD", "JointLoss", "FeatureMatching"}
QUICK = {"budget": "quick", "planted": 0}


class Noisy(nn.Module):
    def __init__(self, network, deviation):
        super().__init__()
        self.network, self.deviation = network, deviation
        self.training = False

    def forward(self, x):
        return self.network(x + self.deviation * torch.randn_like(x))


class Certain(nn.Module):
    """Class 1 where the mean is above a half, by a margin that noise on the logits never turns at these inputs."""

    def __init__(self):
        super().__init__()
        self.training = False

    def forward(self, x):
        margin = 20 * (x.flatten(1).mean(1) - 0.5)
        return torch.stack([-margin, margin], 1) + 0.1 * torch.randn(len(x), 2)


def rounded(x):
    return (x * 8).round() / 8


class Border(Detector):
    """How bright the left and right columns are, which are dark in every digit."""

    def score_of(self, seen):
        return seen.inputs[..., [0, 7]].flatten(1).mean(1)


def test_a_random_model_is_broken_as_its_static_twin_is_and_certified_by_its_own_attack(monkeypatch):
    # Fewer draws than elsewhere: what is planted over five lasts here.
    monkeypatch.setattr(certificates, "_DRAWS", (5,))
    result = robust_ext.evaluate(Noisy(NETWORK, 0.05), INPUTS, LABELS, WIDE, budget="quick", search=False)
    twin = robust_ext.evaluate(NETWORK, INPUTS, LABELS, WIDE, search=False, **QUICK)
    assert twin.robust_accuracy == 0
    assert result.robust_accuracy < 0.05
    content, certificate = result.content, result.content["certificate"]
    assert content["worst_case"]["broken"] == sum(one is not None for one in content["found_by"]) >= 6
    assert content["defense"] == {**content["defense"], "random": True, "repeats": 20}
    # Eight samples decide nothing, and what the attack finds of them is counted.
    assert (certificate["planted"], as_attack(certificate["text"]).eot) == (8, 8)
    assert certificate["found"] >= 6


def test_a_random_model_is_not_called_weaker_than_it_is():
    # At a distance of .3 from the boundary in the mean, no point of the ball is on its other side.
    x = torch.cat([torch.full((4, 1, 4, 4), 0.2), torch.full((4, 1, 4, 4), 0.8)])
    y = torch.tensor([0] * 4 + [1] * 4)
    result = robust_ext.evaluate(Certain(), x, y, ThreatModel(norm="linf", epsilon=0.2), **QUICK)
    assert result.robust_accuracy == 1
    assert result.content["found_by"] == [None] * 8


@pytest.mark.parametrize(("deviation", "draws"), [(0.02, 15), pytest.param(0.5, 60, marks=pytest.mark.exhaustive)])
def test_a_random_model_is_planted_in_over_as_many_draws_as_it_takes(deviation, draws):
    model, settings = Noisy(NETWORK, deviation), EvaluateSettings(seed=0, judge_seed=1, planted=3)
    given = RunKeywords().prepare(NETWORK, INPUTS, LABELS, WIDE, batch_size=8)
    assert draws_to_plant(model, given, settings) == draws


def test_attacks_that_must_not_pass_on_a_random_model_pass_as_seldom_as_on_others():
    """Nine of ten solved problems, drawn again for each of many certificates, whose judge draws afresh each time."""
    x, _ = load_dataset("digits").take(range(64))
    ball = ThreatModel(norm="linf", epsilon=0.1)
    planted = robust_ext.plant(Noisy(NETWORK, 0.05), x, ball, draws=15, inner_points=99, error_rate=ERROR_RATE)
    solved = planted.planted[:, 0]
    rng, rules = torch.Generator().manual_seed(0), Rules(planted.settings)
    trials, passed, share = 120, 0, 0.0
    for _ in range(trials):
        kept = torch.rand(len(solved), 1, 1, 1, generator=rng) < 0.9
        found = planted.verify(torch.where(kept, solved, planted.inputs)).outcomes.count("found")
        share += found / len(solved) / trials
        passed += rules.decide([Solved(found=found, random_found=0, samples=len(solved))])[0] == "passed"
    assert 0.85 < share < 0.91
    assert passed <= trials * ERROR_RATE


def test_a_purifier_that_rounds_is_broken():
    result = robust_ext.evaluate(NETWORK, INPUTS, LABELS, WIDE, defense=rounded, budget="quick")
    content, certificate = result.content, result.content["certificate"]
    assert result.robust_accuracy == 0
    # By the attacks in whose place the identity stands, or those on the static model; none by plain gradients.
    broke = {one["name"]: one["broken"] for one in content["steps"] if one["broken"]}
    assert sum(broke.values()) == content["worst_case"]["broken"]
    assert not any("plain" in name or name == "PGD-20 on the defense" for name in broke)
    assert certificate["found"] == certificate["planted"] == 8
    assert "gradient_mode='identity'" in certificate["text"]
    made = robust_ext.evaluate(as_defense(rounded, NETWORK, INPUTS[:2]), INPUTS, LABELS, WIDE, **QUICK)
    assert made.content["worst_case"] == content["worst_case"]
    assert made.content["found_by"] == content["found_by"]


def test_the_attack_on_a_batch_level_defense_is_certified_in_its_groups():
    """Its rows meet those of their group in the certificate too."""

    def apart(x):
        return rounded(x + 0.05 * (x - x.mean(0)))

    apart.group_size = 4
    result = robust_ext.evaluate(NETWORK, INPUTS, LABELS, WIDE, defense=apart, budget="quick")
    certificate = result.content["certificate"]
    assert result.robust_accuracy == 0
    assert certificate["planted"] >= 7
    assert certificate["found"] == certificate["planted"]


def test_a_detector_that_flags_nothing_changes_nothing():
    detector = Border(NETWORK)
    detector.threshold = torch.tensor(2.0)
    plain = robust_ext.evaluate(NETWORK, INPUTS, LABELS, WIDE, search=False, **QUICK).content
    content = robust_ext.evaluate(NETWORK, INPUTS, LABELS, WIDE, detector=detector, **QUICK).content
    assert plain["worst_case"]["broken"] > 0
    for key in ("worst_case", "found_by", "clean_accuracy"):
        assert content[key] == plain[key]
    assert content["detector"]["false_positive_rate"] == 0
    assert content["detector"]["accepted_accuracy"] == content["clean_accuracy"]


def test_a_detector_that_flags_every_blind_candidate_is_got_past_by_those_that_know_it():
    clean = load_dataset("digits").take(range(100, 200))[0]
    keywords = {"detector": Border, "detector_data": clean, "budget": "quick", "planted": 8}
    result = robust_ext.evaluate(NETWORK, INPUTS, LABELS, WIDE, **keywords)
    content, certificate = result.content, result.content["certificate"]
    broke = {one["name"] for one in content["steps"] if one["broken"]}
    assert content["worst_case"]["broken"] >= 5
    assert broke <= AWARE
    assert certificate["attack"] in broke
    # The sum over both tests.
    assert 8 <= certificate["planted"] <= 16
