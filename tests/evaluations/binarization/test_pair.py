"""Classifiers with a detector: what is planted, the two tests, and attacks that know the detector or not."""

import signal
from functools import partial
from unittest.mock import Mock

import pytest
import torch

import robust_ext
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.detectors import Detector, Observation
from robust_ext.evaluations.binarization.defense import Defense, draw_accepted
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.posing import random_reach
from robust_ext.evaluations.binarization.problems import fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.verdict import pair_verdict
from robust_ext.models.features import split
from tests.evaluations.subjects import Noisy, Pattern
from tests.run_folders import records_of

QUICK = {"inner_points": 100, "canaries": 2, "witness_steps": 5}
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
    return robust_ext.binarization_test(network, attack, inputs, threat_model, **{**QUICK, **settings})


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("kind", [Pattern, Noisy])
def test_points_are_drawn_until_the_detector_agrees(network, digits, further, linf, inverted, kind):
    detector = calibrated(kind, network, further)
    defense = Defense(detector=detector, inverted=inverted, draws=5)
    settings = BinarizationSettings(threat_model=linf, boundary_points=3, reference_points=2)
    found = 0
    for sample in range(8):
        drawn, again = (draw_accepted(digits[sample], sample, settings, defense) for _ in range(2))
        assert drawn.tries == again.tries > 0
        if drawn.candidates is None:
            continue
        found += 1
        assert torch.equal(drawn.candidates, again.candidates)
        count = len(drawn.candidates)
        assert 3 <= count <= 3 * settings.planted_candidates
        assert (drawn.candidates.shape[1:], drawn.references.shape) == ((1, 8, 8), (2, 1, 8, 8))
        clean = digits[sample : sample + 1]
        assert bool(linf.contains(drawn.candidates, clean.expand(count, -1, -1, -1)).all())
        far = linf.distance(drawn.references, clean.expand(2, -1, -1, -1))
        assert float(far.min()) > 1.02 * linf.epsilon
        assert float(far.max()) <= 1.75 * linf.epsilon + 1e-6
        for points in (drawn.candidates, drawn.references):
            expected = Pattern.score_of(detector, Observation(points, points)) > detector.threshold
            assert bool((expected == inverted).all())
    assert found >= 4


def test_where_random_points_are_never_detected_an_attack_finds_some(network, digits, linf):
    class Confident(Detector):
        """Sure of a class that is not the clean one."""

        def score_of(self, seen):
            return seen.logits[:, 1:].amax(1) - seen.logits[:, 0]

    detector = Confident(network)
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


def test_both_tests_and_what_they_hold(network, digits, linf, pattern):
    result = pair(network, digits[:12], linf, detector=pattern)
    (attack,) = result.content["attacks"]
    assert set(attack["tests"]) == {"regular", "inverted"}
    for test in attack["tests"].values():
        assert test["planted_points"]["adversarial"] == test["planted_points"]["drawn"] == test["samples"] > 0
        assert test["planting"]["samples"] == 12
        assert test["samples"] + test["planting"]["not_found"] + test["not_separable"] == 12
        assert test["passes"]["backward"] > 0
        assert sum(test["outcomes"].values()) == test["samples"]
        assert [row["kappa"] for row in test["hardness"]] == [0.999]
    assert attack["score"] == min(test["score"] for test in attack["tests"].values())
    assert attack["verdict"] == pair_verdict(attack["tests"])[0] == result.verdict


def test_an_attack_that_ignores_the_detector_fails_and_one_that_knows_it_passes(network, digits, linf, pattern):
    blind = pair(network, digits[:16], linf, detector=pattern, seed=2)
    adaptive = pair(network, digits[:16], linf, detector=pattern, exposure="margin", seed=2)
    assert blind.verdict == "failed"
    assert adaptive.score >= 0.95 > blind.score
    assert blind.content["attacks"][0]["tests"]["inverted"]["outcomes"]["rejected"] > 0


class Knows(NativeAttack):
    """Notes what a target with a detector shows, and returns a reference or a planted point."""

    name = "knows"
    traits = robust_ext.attacks.AttackTraits(batching="full", detector=True, references=True)

    def search(self, target, inputs, labels, *, threat_model, generator, targeted=False, watch=None):
        logits, excess = target.defended.both(target.references[:, 0])
        self.seen = (logits.argmax(1), excess, target.references.shape)
        return target.references[:, 0]


def test_attacks_that_need_a_detector_are_shown_one(network, digits, linf, pattern):
    knows = Knows()
    result = pair(network, digits[:6], linf, attack=knows, detector=pattern, canaries=0)
    predicted, excess, shape = knows.seen
    assert shape[1:] == (1, 1, 8, 8)
    assert bool((excess <= 0).all())
    # References are class 1, and of no use as an answer: they lie outside the ball.
    assert float(predicted.float().mean()) > 0.5
    tests = result.content["attacks"][0]["tests"]
    assert all(test["outcomes"]["found"] == 0 for test in tests.values())
    assert all(test["outcomes"]["beyond_epsilon"] == test["samples"] for test in tests.values())


@pytest.mark.exhaustive
def test_a_random_detector_is_calibrated_by_the_seed_alone(network, digits, linf, further, tmp_path):
    """Else a run could not be gone on with: another threshold makes it another run."""
    arguments = {"detector_data": further, "detector_fpr": 0.3, "out": tmp_path}
    detectors = [Noisy(network) for _ in range(3)]
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = pair(network, digits[:4], linf, detector=detectors[0], **arguments)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again = pair(network, digits[:4], linf, detector=detectors[1], **arguments)
    assert first == again
    pair(network, digits[:2], linf, detector=detectors[2], **{**arguments, "out": None, "seed": 5})
    assert torch.equal(detectors[0].threshold, detectors[1].threshold)
    assert not torch.equal(detectors[0].threshold, detectors[2].threshold)


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


class Broken(Detector):
    def __init__(self, classifier, answer):
        super().__init__(classifier)
        self.answer, self.threshold = answer, torch.tensor(0.0)

    def score_of(self, seen):
        return self.answer(seen)


def test_the_random_attack_counts_the_detector(network, digits, linf, pattern):
    parts = split(network, digits[:2])
    forward = Forward(Counted(parts.features, PassCounter()), 256)
    settings = BinarizationSettings(threat_model=linf, inner_points=100)
    problems = fit(measure(forward, digits[:12], range(12), settings), parts.readout, settings)

    def solved(defense=None):
        return random_reach(forward, [problems], [0.5], settings, defense=defense)[0][:, 0] > 0.5

    easy = solved()
    assert int(easy.sum()) > 0
    silent = Broken(network, lambda seen: seen.logits[:, 0] * 0 - 1)
    assert torch.equal(solved(Defense(detector=silent, inverted=False)), easy)
    assert not bool(solved(Defense(detector=silent, inverted=True)).any())
    # What the detector lets pass and what it detects make up all points, and no problem is solved by none.
    sides = [solved(Defense(detector=pattern, inverted=inverted)) for inverted in (False, True)]
    assert torch.equal(sides[0] | sides[1], easy | sides[0] | sides[1])
    assert int((sides[0] ^ sides[1]).sum()) > 0
