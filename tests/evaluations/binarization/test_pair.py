"""Classifiers with a detector, in two tests; test-time defenses, which are tested themselves; and heads that mask."""

import signal
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from robust_ext import RobustExtWarning, as_attack, binarization_test
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.core.errors import RunFolderError
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.defenses.adp import AdaptiveDenoising
from robust_ext.defenses.hd import HedgeDefense
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Observation, ScoreDetector
from robust_ext.evaluations.binarization.defense import Defense, draw_accepted
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.head import OF_HEAD, probe_head
from robust_ext.evaluations.binarization.planting import plant
from robust_ext.evaluations.binarization.posing import random_reach
from robust_ext.evaluations.binarization.problems import fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.verdict import pair_verdict
from robust_ext.models.adaptive import Purifier
from robust_ext.models.features import split
from tests.evaluations.diagnosis.models import Opposite
from tests.evaluations.subjects import Noisy, Pattern, Rounding, climb
from tests.run_folders import records_of

PGD = "foolbox:LinfPGD(steps=30, rel_stepsize=0.1)"


@pytest.fixture(scope="module")
def further():
    dataset = load_dataset("digits")
    return dataset.take(dataset.choose(264, seed=0)[64:])[0]


def calibrated(kind, network, further):
    detector = kind(network)
    detector.calibrate(further, false_positive_rate=0.3)
    return detector


@pytest.fixture(scope="module")
def pattern(network, further):
    return calibrated(Pattern, network, further)


def pair(network, inputs, threat_model, attack=PGD, **settings):
    quick = {"inner_points": 100, "canaries": 2, "witness_steps": 5}
    return binarization_test(network, attack, inputs, threat_model, **{**quick, **settings})


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("kind", [Pattern, Noisy])
def test_points_are_drawn_until_the_detector_agrees(network, digits, further, linf, inverted, kind):
    detector, found = calibrated(kind, network, further), 0
    defense = Defense(detector=detector, inverted=inverted, draws=5)
    settings = BinarizationSettings(threat_model=linf, boundary_points=3, reference_points=2)
    for sample in range(8):
        drawn, again = (draw_accepted(digits[sample], sample, settings, defense) for _ in range(2))
        assert drawn.tries == again.tries > 0
        if drawn.candidates is None:
            continue
        found += 1
        assert torch.equal(drawn.candidates, again.candidates)
        assert 3 <= len(drawn.candidates) <= 3 * settings.planted_candidates
        assert (drawn.candidates.shape[1:], drawn.references.shape) == ((1, 8, 8), (2, 1, 8, 8))
        assert bool(linf.contains(drawn.candidates, digits[sample].expand_as(drawn.candidates)).all())
        far = linf.distance(drawn.references, digits[sample].expand(2, -1, -1, -1))
        assert 1.02 * linf.epsilon < float(far.min()) <= float(far.max()) <= 1.75 * linf.epsilon + 1e-6
        for points in (drawn.candidates, drawn.references):
            expected = Pattern.score_of(detector, Observation(points, points)) > detector.threshold
            assert bool((expected == inverted).all())
    assert found >= 4


def test_where_random_points_are_never_detected_an_attack_finds_some(network, digits):
    # Sure of a class that is not the clean one.
    detector = ScoreDetector(network, lambda x: network(x)[:, 1:].amax(1) - network(x)[:, 0])
    detector.threshold = torch.tensor(-1.0)
    zeros = digits[network(digits).argmax(1) == 0][:3]
    settings = BinarizationSettings(threat_model=ThreatModel(norm="linf", epsilon=0.3), planting_tries=32, gap=0.0)
    drawn = [draw_accepted(x, i, settings, Defense(detector=detector, inverted=True)) for i, x in enumerate(zeros)]
    planted = [one for one in drawn if one.candidates is not None]
    assert "attack" in [one.source for one in planted]
    assert bool(detector.decide(torch.cat([one.candidates for one in planted])).all())
    # In the regular test nobody is attacked; a detector that detects all there is leaves nothing to plant.
    detector.threshold = torch.tensor(-1e9)
    none = draw_accepted(zeros[0], 0, settings, Defense(detector=detector, inverted=False))
    assert (none.candidates, none.tries, none.source) == (None, 32, "random")


def test_an_attack_that_ignores_the_detector_fails_and_one_that_knows_it_passes(network, digits, linf, pattern):
    blind = pair(network, digits[:16], linf, detector=pattern, seed=2)
    adaptive = pair(network, digits[:16], linf, detector=pattern, exposure="margin", seed=2)
    (attack,) = blind.content["attacks"]
    assert attack["verdict"] == pair_verdict(attack["tests"])[0] == blind.verdict == "failed"
    assert adaptive.score >= 0.95 > blind.score
    assert attack["tests"]["inverted"]["outcomes"]["rejected"] > 0
    assert set(attack["tests"]) == {"regular", "inverted"}
    assert attack["score"] == min(test["score"] for test in attack["tests"].values())
    for test in attack["tests"].values():
        assert test["planted_points"]["adversarial"] == test["planted_points"]["drawn"] == test["samples"] > 0
        assert test["samples"] + test["planting"]["not_found"] + test["not_separable"] == 16
        assert test["passes"]["backward"] > 0
        assert sum(test["outcomes"].values()) == test["samples"]


def test_attacks_that_need_points_of_another_class_are_shown_some(network, digits, linf, pattern):
    matching = "robust_ext:FeatureMatching(steps=30)"
    result = pair(network, digits[:6], linf, attack=matching, detector=pattern, canaries=0)
    assert min(test["score"] for test in result.content["attacks"][0]["tests"].values()) >= 0.5


def test_a_run_that_was_stopped_goes_on(network, digits, linf, pattern, tmp_path):
    calls = Mock(side_effect=[False, True])

    def breaking(model, x, y):
        if calls():
            signal.raise_signal(signal.SIGINT)
        return x

    run = partial(pair, network, digits[:8], linf, {"a": breaking}, canaries=0, detector=pattern, batch_size=4)
    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path / "a")
    calls.side_effect, calls.return_value = None, False
    resumed, fresh = run(out=tmp_path / "a"), run(out=tmp_path / "b")
    for test in ("regular", "inverted"):
        assert records_of(tmp_path / "a" / test) == records_of(tmp_path / "b" / test)
    assert resumed.score == fresh.score == 0
    assert fresh.content["attacks"][0]["tests"]["regular"]["samples"] == 8


def test_the_random_attack_counts_the_detector(network, digits, linf, pattern):
    parts, settings = split(network, digits[:2]), BinarizationSettings(threat_model=linf, inner_points=100)
    forward = Forward(Counted(parts.features, PassCounter()), 256)
    problems = fit(measure(forward, digits[:12], range(12), settings), parts.readout, settings)

    def solved(detector=None, inverted=False):
        defense = None if detector is None else Defense(detector=detector, inverted=inverted)
        return random_reach(forward, [problems], [0.5], settings, defense=defense)[0][:, 0] > 0.5

    easy, silent = solved(), ScoreDetector(network, lambda x: x.flatten(1).sum(1) * 0 - 1)
    silent.threshold = torch.tensor(0.0)
    assert int(easy.sum()) > 0
    assert torch.equal(solved(silent), easy)
    assert not bool(solved(silent, inverted=True).any())
    # What the detector lets pass and what it detects make up all points, and no problem is solved by none.
    sides = [solved(pattern, inverted) for inverted in (False, True)]
    assert torch.equal(sides[0] | sides[1], easy | sides[0] | sides[1])
    assert int((sides[0] ^ sides[1]).sum()) > 0


# Test-time defenses.

LINF = ThreatModel(norm="linf", epsilon=0.1)
WEAK = "foolbox:LinfPGD(steps=20, rel_stepsize=0.005, random_start=False)"


class Centred(Purifier):
    """Steps away from the mean of a group: what one row comes to depends on the others."""

    batch_level = True

    def step(self, point, *, x, number, state, rng):
        return point + 0.1 * (point - point.mean(0))


def climbing(model, x, y, threat_model):
    return climb(model, x, y, epsilon=threat_model.epsilon, steps=15, step=0.2)


def by_bpda(**settings):
    return AdaptedAttack(attack=as_attack(climbing), **settings)


def run(defense, *attacks, samples=8, **settings):
    inputs, _ = load_dataset("digits").take(range(samples))
    small = {"inner_points": 60, "random_inner": 20, "random_corners": 20, "canaries": 2}
    return binarization_test(defense, list(attacks), inputs, LINF, kappa=0.9, **small, **settings)


def test_zero_gradients_fail_and_the_wrapper_passes(tmp_path):
    attacks = climbing, by_bpda(), by_bpda(gradient_mode="trajectory")
    plain, identity, trajectory = run(Rounding(digits_network(), steps=2), *attacks, out=tmp_path).content["attacks"]
    assert identity["name"] == "climbing through identity"
    assert plain["score"] <= 0.2
    assert min(identity["score"], trajectory["score"]) >= 0.8
    assert plain["samples"] == identity["samples"] >= 6
    assert identity["passes"]["backward"] > 0
    # Another setting of the defense is another run.
    with pytest.raises(RunFolderError):
        run(Rounding(digits_network(), steps=1), *attacks, out=tmp_path)


class Shrinking(nn.Module):
    """A score that pulls towards black."""

    def forward(self, x):
        return -0.2 * x


@pytest.mark.parametrize(
    ("make", "draws"),
    [
        (lambda network: HedgeDefense(network, steps=2, radius=0.1, step_size=0.05), 9),
        (lambda network: AdaptiveDenoising(network, score=Shrinking(), runs=2, steps=2), 1),
    ],
    ids=["random, by majority", "probabilities, one draw held"],
)
def test_a_weak_recipe_fails_and_a_right_one_passes(make, draws):
    """Steps that are too small end on the way; the same through the identity, averaged over draws, are enough."""
    attacks = as_attack(WEAK).named("weak"), by_bpda(eot=4)
    small, right = run(make(digits_network()), *attacks, draws=draws, depths=(1,)).content["attacks"]
    assert right["samples"] >= 6
    assert (small["verdict"], small["score"]) == ("failed", pytest.approx(0, abs=0.2))
    assert right["score"] >= 0.85


def test_groups_are_planted_in_and_attacked_as_they_are_judged():
    """What is found is found by the defense itself, in the batch of all candidates."""
    defense, attacks = Centred(digits_network(), steps=2, group_size=4), (as_attack(WEAK).named("weak"), by_bpda())
    result = run(defense, *attacks, samples=6, depths=(1,))
    assert result.content["settings"]["batch_size"] == 32
    short, right = result.content["attacks"]
    assert (short["score"], right["score"], right["samples"]) == (0, 1, 6)
    assert right["random_score"] <= 0.5


# Heads that mask gradients behind the features, where the test puts a readout in their place.


class Headed(nn.Module):
    """The digits network with something behind its logits; the same for noisy inputs."""

    def __init__(self, head, noise=0.0):
        super().__init__()
        self.network, self.head, self.noise = digits_network(), head, noise
        self.eval()

    def forward(self, x):
        return self.head(self.network(x + self.noise * torch.randn_like(x) if self.noise else x))


def seeded(*layers):
    generator = torch.Generator().manual_seed(0)
    for part in (part for layer in layers for part in layer.parameters()):
        part.data = torch.randn(part.shape, generator=generator) / part.shape[-1] ** 0.5
    return nn.Sequential(*layers).eval()


CENTRES = torch.eye(10).mul(4)
MASKING = {
    "opposite sign": (lambda z: -z + 2 * z.detach(), "wrong_gradient"),
    "rounded": (lambda z: (z * 100).round() / 100, "zero_gradient"),
    "steep tanh": (lambda z: torch.tanh(1000 * z), "zero_gradient"),
    "function of the other sign": (Opposite.apply, "wrong_gradient"),
    "one class detached": (lambda z: torch.cat([z[:, :1].detach(), z[:, 1:]], 1), "wrong_gradient"),
    "steep sigmoids": (lambda z: 5 * torch.sigmoid(50 * z) - 1, "saturated_layer"),
    "without gradients at all": (lambda z: z.detach(), "cut_gradient"),
}
SOUND = {
    "linear": lambda z: z,
    "log-softmax": lambda z: z.log_softmax(1),
    "softcap": lambda z: 30 * torch.tanh(z / 30),
    "cosine": lambda z: 10 * F.normalize(z, dim=1) @ F.normalize(CENTRES + 0.3, dim=1),
    "distances": lambda z: -torch.cdist(z, CENTRES).square(),
    "layer norm": lambda z: F.layer_norm(z, (10,)),
    "rounded, straight through": lambda z: z + (z.mul(10).round().div(10) - z).detach(),
    "MLP": seeded(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10)),
    "MLP of two outputs more": seeded(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 12)),
}
ALL = {**{name: (head, "") for name, head in SOUND.items()}, **MASKING}


@pytest.mark.parametrize("name", ALL)
def test_heads_that_mask_gradients_are_found_and_nothing_draws(name, digits):
    head, code = ALL[name]
    parts, before = split(Headed(head), digits[:4]), torch.get_rng_state()
    assert probe_head(parts.features, parts.readout, digits[:4]).fault == code
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["plain", "random", "detector"])
@pytest.mark.parametrize("name", ["opposite sign", "log-softmax"])
@pytest.mark.filterwarnings("ignore:.* the gradient of some rows was zero")
def test_random_models_and_those_with_a_detector_are_planted_behind_their_heads(kind, name, digits, linf):
    """A sound head is passed, one that masks gradients is named, and no attack passes there."""
    options, sound = {"inner_points": 60, "depths": (1,), "canaries": 0}, name in SOUND
    model, attack = Headed(ALL[name][0], noise=0.01 * (kind == "random")), "robust_ext:APGD(steps=10)"
    if kind == "random":
        options["draws"] = 3
    if kind == "detector":
        attack = "robust_ext:OrthogonalPGD(steps=100)"
        options["detector"] = Pattern(model)
        options["detector"].calibrate(digits, false_positive_rate=0.3)
    content = binarization_test(model, attack, digits[:16], linf, **options).content
    findings = [one for one in content["findings"] if one["attack"] is None and one["code"] in OF_HEAD]
    assert bool(findings) != sound
    assert all(one["weight"] == "high" and one["remedies"] for one in findings)
    (entry,) = content["attacks"]
    for test in entry.get("tests", {"": entry}).values():
        counts = test["at_logits"]
        assert (test["score"], counts["found"]) == (1, counts["samples"] if sound else 0)
        assert counts["samples"] >= 8
        assert ("the head, which the test replaces, masks gradients" in test["reason"]) != sound
        assert (test["verdict"] == "failed") != sound


def test_a_head_behind_which_nothing_is_planted_is_said_not_to_be_tested(digits, linf):
    model = Headed(lambda z: F.dropout(z, 0.05, training=True))
    settings = {"inner_points": 100, "planted_candidates": 32, "depths": (1,), "draws": 4}
    with pytest.warns(RobustExtWarning, match="Nothing could be planted at the logits"):
        result = binarization_test(model, "robust_ext:APGD(steps=10)", digits[:32], linf, **settings)
    assert result.content["findings"] == []


def test_planted_groups_are_solved_together_and_alone():
    """Planted points are adversarial beside each other and beside clean samples; the defense itself says so."""
    inputs, network = load_dataset("digits").take(range(8))[0], digits_network()
    defense = Centred(network, steps=2, group_size=4)
    planted = plant(defense, inputs, LINF, inner_points=60)
    points = planted.planted[:, 0]
    assert (len(planted), planted.score(points), planted.score(inputs)) == (8, 1, 0)
    finals = defense.solution(points, seeds=defense.next_seeds(8)).final
    torch.testing.assert_close(planted.module.features(points), split(network, inputs).features(finals))
    for row in range(8):
        mixed = torch.where(torch.arange(8).view(-1, 1, 1, 1) == row, points, inputs)
        assert planted.judge(mixed).argmax(1).tolist() == [int(one == row) for one in range(8)]


@pytest.mark.parametrize("name", ["opposite sign", "steep tanh"])
def test_no_attack_passes_whose_gradients_die_in_the_head(name, digits, linf):
    attacks = {"pgd": "robust_ext:APGD(steps=10)", "random": "robust_ext:RandomSearch(points=50)"}
    result = binarization_test(Headed(ALL[name][0]), attacks, digits[:32], linf, inner_points=150, depths=(1,))
    pgd, random = result.content["attacks"]
    assert (pgd["score"], pgd["verdict"]) == (1, "failed")
    # What takes no gradients meets no mask.
    assert "the head" not in random["reason"].partition("Most likely")[0]
    (found, *_) = [one for one in result.content["findings"] if one["attack"] is None]
    assert (found["code"] in OF_HEAD, found["weight"], bool(found["remedies"])) == (True, "high", True)
