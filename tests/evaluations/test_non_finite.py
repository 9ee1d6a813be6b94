"""Networks that return NaN are not robust where they do: the same numbers as without NaN, and what rests on it said.

Every network here has a twin that returns NaN wherever the network is wrong. Comparisons with NaN are false, so that
attacks step over these points, and used to leave a twin looking robust.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, binarization_test, evaluate_defense, mead, robust_accuracy
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.binarization.attacking import count_planted

THREAT = ThreatModel(norm="linf", epsilon=0.15)
ATTACKS = {
    "APGD": "robust_ext:APGD(steps=20)",
    "RayS": "robust_ext:RayS(queries=300, stop=False)",
    "Foolbox": "foolbox:LinfPGD(steps=20)",
    "ART": "art:ProjectedGradientDescent(max_iter=20, eps_step=0.02)",
}


class NanWhereWrong(nn.Module):
    """Returns NaN where the nearest clean input has another label than the network gives, at most so many of them."""

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
    network, dataset = digits_network(), load_dataset("digits")
    inputs, labels = dataset.take(dataset.choose(48, seed=1))
    with torch.no_grad():
        right = network(inputs).argmax(1) == labels
    inputs, labels = inputs[right][:40], labels[right][:40]
    return network, NanWhereWrong(network, inputs, labels), inputs, labels


@pytest.mark.parametrize("name", ATTACKS)
def test_robust_accuracy_is_that_of_the_network_without_nan(subject, name):
    pytest.importorskip(ATTACKS[name].partition(":")[0])
    network, twin, inputs, labels = subject
    settings = {"batch_size": 40, "seed": 0}
    plain, broken = (
        robust_accuracy(one, {name: ATTACKS[name]}, inputs, labels, THREAT, **settings) for one in (network, twin)
    )
    assert broken.robust_accuracy(0.15) == plain.robust_accuracy(0.15) < 0.6
    (row,) = broken.content["worst_case"]
    assert (row["non_finite"], row["without_non_finite"]) == (round(40 * (1 - row["robust_accuracy"])), 1.0)
    assert plain.content["worst_case"][0]["non_finite"] == 0
    assert plain.content["warnings"] == []
    (warning,) = [one for one in broken.content["warnings"] if "NaN" in one]
    counts = broken.attacks[name]["outcomes"]
    assert f"{name}: {counts['non_finite_logits']} of 40" in warning
    assert f"{row['non_finite']} of 40 samples are broken by non-finite logits alone" in broken.to_html()


def test_witnesses_of_one_run_count_at_every_budget_they_are_within(subject):
    _, twin, inputs, labels = subject
    result = robust_accuracy(twin, ATTACKS["RayS"], inputs, labels, THREAT, epsilons=(0.05, 0.15, 0.3))
    attack = result.content["attacks"][0]
    distances = np.array([np.inf if value is None else value for value in attack["distances"]])
    for row in attack["robust_accuracy"]:
        assert (
            row["non_finite"] == (distances <= row["epsilon"] + 1e-6).sum() == round(40 * (1 - row["robust_accuracy"]))
        )


def test_mead_counts_them_as_successes_and_gives_the_numbers_without_them(subject):
    network, twin, inputs, labels = subject
    detectors = {"nan": lambda x: twin(x)[:, 0], "spread": lambda x: x.flatten(1).std(1)}
    attacks = {"APGD": ATTACKS["APGD"], "noise": "robust_ext:RandomSearch(points=5)"}
    arms = [Arm(attack=attack, epsilon=0.15, label=name) for name, attack in attacks.items()]
    plain, broken = (
        mead(one, arms, inputs, labels, THREAT, detectors=detectors, resamples=0) for one in (network, twin)
    )
    successes = plain.arms["APGD linf 0.15"]["successes"]
    assert broken.arms["APGD linf 0.15"]["successes"] == successes > 20
    assert broken.arms["APGD linf 0.15"]["outcomes"]["non_finite_logits"] == successes
    spread = broken.detectors["spread"]["results"][0]
    assert spread["positives"] == spread["non_finite"] == plain.detectors["spread"]["results"][0]["positives"]
    assert spread["auroc_without_non_finite"] is None
    # A detector that returns NaN there lets none of them pass, and none counts as detected either.
    scored = broken.detectors["nan"]["results"][0]
    met = sum(arm["successes"] for arm in broken.content["arms"])
    assert (scored["unscored"], scored["positives"], scored["auroc"]) == (met, 0, None)
    assert any("NaN" in warning for warning in broken.content["warnings"])


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
    assert static["non_finite"] == 0
    assert (defended["robust_accuracy"], defended["non_finite"]) == (0.0, 40)
    assert alone["defended"]["attacks"][0]["outcomes"] == {"non_finite_logits": 40}
    for content in (both, alone):
        assert any("returned NaN or infinite logits" in warning for warning in content["warnings"])


def test_the_binarization_test_fails_no_attack_for_a_network_that_breaks_down():
    network, dataset = digits_network(), load_dataset("digits")
    inputs, _ = dataset.take(dataset.choose(16, seed=0))
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    features, readout = network[:-1], network[-1]

    class AtHalf(nn.Module):
        """NaN at points half way to the surface, where nothing is planted or drawn but attacks pass."""

        def forward(self, x):
            moved = torch.cdist(x.detach().flatten(1), inputs.flatten(1), p=torch.inf).amin(1)
            half = (moved > 0.04) & (moved < 0.06)
            return torch.where(half[:, None], torch.nan, features(x))

    def stepping(model, x, y, threat_model):
        """Passes through the middle of the ball, and returns its input."""
        model((x + 0.05).clamp(0, 1))
        model((x - 0.05).clamp(0, 1))
        return x

    model = (AtHalf().eval(), readout)
    result = binarization_test(model, stepping, inputs, threat_model, inner_points=50, canaries=2)
    (attack,) = result.content["attacks"]
    broken = attack["outcomes"]["non_finite_logits"]
    assert broken >= 0.9 * attack["samples"] > 8
    assert (attack["outcomes"]["found"], attack["score"]) == (0, 0.0)
    assert result.verdict == "inconclusive"
    assert f"In {broken} of {attack['samples']} problems" in attack["reason"]
    assert attack["canaries"]["repaired"] == 0
    assert "NaN" in result.content["warnings"][0]


def test_a_planted_point_without_finite_logits_is_not_planted():
    """The largest of NaN and a number is NaN, to torch."""
    logits = {0.0: [1.0, 0.0], 1.0: [0.0, 1.0], 2.0: [0.0, torch.nan], 3.0: [-torch.inf, torch.inf]}

    class Looked(nn.Module):
        def forward(self, x):
            return torch.tensor([logits[value] for value in x.flatten().tolist()])

    planted = torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 2.0], [2.0, 3.0]])[..., None]
    problems = SimpleNamespace(inputs=torch.zeros(4, 1), planted=planted)
    assert count_planted(Looked(), problems).tolist() == [1, 2, 1, 0]
    problems.inputs[1] = 2.0
    assert count_planted(Looked(), problems).tolist() == [1, 0, 1, 0]
