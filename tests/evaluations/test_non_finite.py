"""Samples on which an attack ended, and networks that return NaN: neither makes a model look more robust."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, binarization_test, evaluate_defense, mead, robust_accuracy
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.task import run_task
from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.binarization.attacking import count_planted
from tests.evaluations.subjects import spread

THREAT, NEAR = ThreatModel(norm="linf", epsilon=0.15), ThreatModel(norm="linf", epsilon=0.1)
APGD = "robust_ext:APGD(steps=20)"
ATTACKS = {
    "APGD": APGD,
    "RayS": "robust_ext:RayS(queries=300, stop=False)",
    "Foolbox": "foolbox:LinfPGD(steps=20)",
    "ART": "art:ProjectedGradientDescent(max_iter=20, eps_step=0.02)",
}
WORDS = {"ended": "the attack's process ended: exit status 0", "timed_out": "the attack was stopped after 3 seconds"}


class NanWhereWrong(nn.Module):
    """Returns NaN where the nearest clean input has another label than the network gives."""

    def __init__(self, network, inputs, labels):
        super().__init__()
        self.network = network
        self.register_buffer("inputs", inputs.flatten(1))
        self.register_buffer("labels", labels)
        self.eval()

    def forward(self, x):
        logits = self.network(x)
        nearest = torch.cdist(x.detach().flatten(1), self.inputs).argmin(1)
        wrong = logits.argmax(1) != self.labels[nearest]
        return torch.where(wrong[:, None], torch.nan, logits)


@pytest.fixture(scope="module")
def subject():
    """A network, its twin that returns NaN, and samples that both are right on."""
    network, dataset = digits_network().requires_grad_(False), load_dataset("digits")
    inputs, labels = dataset.take(dataset.choose(48, seed=1))
    right = network(inputs).argmax(1) == labels
    inputs, labels = inputs[right][:40], labels[right][:40]
    return network, NanWhereWrong(network, inputs, labels), inputs, labels


@pytest.fixture(params=WORDS)
def lost(request, monkeypatch):
    """The outcome of every second batch, whose worker returns nothing."""
    calls = []

    def worker(task):
        result = run_task(task)
        calls.append(task)
        if len(calls) % 2:
            return result
        return replace(result, candidates=None, witnesses=None, lost=(request.param, WORDS[request.param]))

    @contextmanager
    def workers(**_settings):
        yield worker

    monkeypatch.setattr("robust_ext.evaluations.run_keywords.attack_worker", workers)
    return request.param


def test_what_was_not_attacked_leaves_an_upper_bound_of_robust_accuracy(subject, lost):
    network, _, *given = subject
    result = robust_accuracy(network, {"APGD": APGD}, *given, THREAT, batch_size=10)
    (row,), found = result.content["worst_case"], result.attacks["APGD"]["outcomes"]
    assert (found[lost], row["not_attacked"], row["non_finite"]) == (20, 20, 0)
    assert row["robust_accuracy"] == 1 - found["found"] / 40 >= 0.5
    assert result.content["warnings"][0].startswith(f"APGD: 20 of 40 samples: {WORDS[lost]}.")
    assert f"≤ {100 * row['robust_accuracy']:.1f}" in str(result)
    # What another attack breaks is broken.
    result = robust_accuracy(network, {"APGD": APGD, "again": APGD}, *given, THREAT, batch_size=40)
    (row,), found, again = result.content["worst_case"], result.attacks["APGD"]["outcomes"], result.attacks["again"]
    total = {found.get(lost, 0), again["outcomes"].get(lost, 0)}
    assert total == {0, 40}
    assert row["not_attacked"] == round(40 * row["robust_accuracy"]) < 40


def test_what_was_not_attacked_is_no_success_of_other_evaluations(subject, lost):
    network, _, inputs, labels = subject
    found = mead(network, [APGD], inputs, labels, THREAT, detectors={"spread": spread}, batch_size=10, resamples=0)
    (arm,), (row,) = found.content["arms"], found.detectors["spread"]["results"]
    assert (arm["outcomes"][lost], row["not_attacked"]) == (20, 20)
    assert arm["successes"] == arm["outcomes"]["found"] == row["positives"] <= 20
    found = evaluate_defense(lambda x: x, APGD, inputs, labels, THREAT, classifier=network, batch_size=10)
    for side in ("static", "defended"):
        worst, (attack,) = found.content[side]["worst_case"], found.content[side]["attacks"]
        assert attack["outcomes"][lost] == worst["not_attacked"] == attack["not_attacked"] == 20
        assert worst["robust_accuracy"] >= 0.5
    settings = {"inner_points": 50, "batch_size": 10, "canaries": 0, "judge_seed": 1}
    found = binarization_test(network, {"APGD": APGD}, inputs, NEAR, **settings)
    attack = found.attacks["APGD"]
    assert attack["outcomes"][lost] == attack["samples"] - attack["outcomes"]["found"] == 20
    assert found.verdict == "failed"
    assert f"20 of 40 problems: {WORDS[lost]}" in attack["reason"]


@pytest.mark.parametrize("name", ATTACKS)
def test_robust_accuracy_is_that_of_the_network_without_nan(subject, name):
    pytest.importorskip(ATTACKS[name].partition(":")[0])
    network, twin, *given = subject
    plain, broken = (
        robust_accuracy(one, {name: ATTACKS[name]}, *given, THREAT, batch_size=40) for one in (network, twin)
    )
    assert broken.robust_accuracy(0.15) == plain.robust_accuracy(0.15) < 0.6
    (row,) = broken.content["worst_case"]
    assert (row["non_finite"], row["without_non_finite"]) == (round(40 * (1 - row["robust_accuracy"])), 1.0)
    assert plain.content["worst_case"][0]["non_finite"] == 0
    assert plain.content["warnings"] == []
    (warning,) = [one for one in broken.content["warnings"] if "NaN" in one]
    assert f"{name}: {broken.attacks[name]['outcomes']['non_finite_logits']} of 40" in warning
    assert f"{row['non_finite']} of 40 samples are broken by non-finite logits alone" in broken.to_html()


def test_witnesses_of_one_run_count_at_every_budget_they_are_within(subject):
    _, twin, *given = subject
    (attack,) = robust_accuracy(twin, ATTACKS["RayS"], *given, THREAT, epsilons=(0.05, 0.15, 0.3)).content["attacks"]
    distances = np.array([np.inf if value is None else value for value in attack["distances"]])
    for row in attack["robust_accuracy"]:
        counted = (distances <= row["epsilon"] + 1e-6).sum()
        assert row["non_finite"] == counted == round(40 * (1 - row["robust_accuracy"]))


def test_mead_counts_them_as_successes_and_gives_the_numbers_without_them(subject):
    network, twin, *given = subject
    detectors = {"nan": lambda x: twin(x)[:, 0], "spread": spread}
    attacks = {"APGD": APGD, "noise": "robust_ext:RandomSearch(points=5)"}
    arms = [Arm(attack=attack, epsilon=0.15, label=name) for name, attack in attacks.items()]
    plain, broken = (mead(one, arms, *given, THREAT, detectors=detectors, resamples=0) for one in (network, twin))
    successes = plain.arms["APGD linf 0.15"]["successes"]
    assert broken.arms["APGD linf 0.15"]["successes"] == successes > 20
    assert broken.arms["APGD linf 0.15"]["outcomes"]["non_finite_logits"] == successes
    row = broken.detectors["spread"]["results"][0]
    assert row["positives"] == row["non_finite"] == plain.detectors["spread"]["results"][0]["positives"]
    assert row["auroc_without_non_finite"] is None
    # A detector that returns NaN there lets none of them pass, and none counts as detected either.
    scored, met = broken.detectors["nan"]["results"][0], sum(arm["successes"] for arm in broken.content["arms"])
    assert (scored["unscored"], scored["positives"], scored["auroc"]) == (met, 0, None)
    assert any("nan scored NaN" in warning for warning in broken.content["warnings"])


def test_test_time_defenses_and_static_models_break_down_apart(subject):
    network, twin, inputs, labels = subject

    def evaluated(purify, classifier):
        settings = {"classifier": classifier, "steps": 10}
        return evaluate_defense(purify, "robust_ext:APGD(steps=10)", inputs, labels, THREAT, **settings).to_dict()

    def far(x):
        return torch.cdist(x.detach().flatten(1), inputs.flatten(1), p=torch.inf).amin(1)[:, None, None, None] > 0.1

    plain = evaluated(lambda x: x, network)["static"]["worst_case"]["robust_accuracy"]
    both = evaluated(lambda x: x, twin)
    for side in ("static", "defended"):
        worst = both[side]["worst_case"]
        assert worst["robust_accuracy"] == both[side]["attacks"][0]["robust_accuracy"] == plain < 0.6
        assert (worst["non_finite"], worst["without_non_finite"]) == (round(40 * (1 - plain)), 1.0)
    # Here the defense alone breaks down, wherever it goes far from the clean inputs.
    alone = evaluated(lambda x: torch.where(far(x), torch.nan, x), network)
    static, defended = (alone[side]["worst_case"] for side in ("static", "defended"))
    assert (static["non_finite"], defended["non_finite"], defended["robust_accuracy"]) == (0, 40, 0.0)
    assert alone["defended"]["attacks"][0]["outcomes"] == {"non_finite_logits": 40}
    for content in (both, alone):
        assert any("returned NaN or infinite logits" in warning for warning in content["warnings"])


def test_a_planted_point_without_finite_logits_is_not_planted():
    """The largest of NaN and a number is NaN, to torch."""
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, torch.nan], [-torch.inf, torch.inf]])
    planted = torch.tensor([[0, 1], [1, 1], [1, 2], [2, 3]])[..., None]
    for clean, counts in ((0, [1, 2, 1, 0]), (2, [1, 0, 1, 0])):
        problems = SimpleNamespace(inputs=torch.tensor([[0], [clean], [0], [0]]), planted=planted)
        assert count_planted(lambda x: logits[x.flatten()], problems).tolist() == counts


def test_the_binarization_test_fails_no_attack_for_a_network_that_breaks_down(subject):
    network, _, inputs, _ = subject
    inputs = inputs[:16]

    class AtHalf(nn.Module):
        """NaN at points half way to the surface, where nothing is planted or drawn but attacks pass."""

        def forward(self, x):
            moved = torch.cdist(x.detach().flatten(1), inputs.flatten(1), p=torch.inf).amin(1)
            return torch.where(((moved > 0.04) & (moved < 0.06))[:, None], torch.nan, network[:-1](x))

    def stepping(model, x, y):
        """Passes through the middle of the ball, and returns its input."""
        model((x + 0.05).clamp(0, 1))
        model((x - 0.05).clamp(0, 1))
        return x

    model = AtHalf().eval(), network[-1]
    result = binarization_test(model, stepping, inputs, NEAR, inner_points=50, canaries=2)
    (attack,) = result.content["attacks"]
    broken = attack["outcomes"]["non_finite_logits"]
    assert broken >= 0.9 * attack["samples"] > 8
    assert (attack["outcomes"]["found"], attack["score"], result.verdict) == (0, 0.0, "inconclusive")
    assert f"In {broken} of {attack['samples']} problems" in attack["reason"]
    assert attack["canaries"]["repaired"] == 0
    assert "NaN" in result.content["warnings"][0]
