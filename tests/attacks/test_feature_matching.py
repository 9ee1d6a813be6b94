"""Feature matching: what it pulls where, by which features."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from robust_ext.attacks.feature_matching import FeatureMatching, feature_map
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.detectors import Detector
from robust_ext.models.defended import Defended
from tests.attacks.defenses import small_defense
from tests.attacks.problems import Lambda, attacked, predicted, watched


def identity(x):
    return x.flatten(1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("distance", ["l2", "linf"])
def test_with_the_inputs_for_features_it_ends_at_the_nearest_point_to_the_reference(norm, distance):
    problem = small_defense(8, norm=norm, epsilon={"linf": 0.2, "l2": 0.5, "l1": 1.5}[norm], references=1)
    reference, epsilon = problem.target.references[:, 0], problem.threat_model.epsilon
    for size, count in ((0.05, 100), (0.005, 400)):
        made = FeatureMatching(features=identity, distance=distance, weight=0, steps=count, rel_step_size=size)
        steps = watched(made, problem)
        last = steps[-1].points
        if distance == "l2" and norm == "linf":
            # Clipping is the projection onto a cube.
            nearest = reference.clamp(problem.inputs - epsilon, problem.inputs + epsilon)
            assert float((last - nearest).abs().max()) <= 2.01 * size * epsilon
        if distance == "l2" and norm == "l2" and size == 0.05:
            offset = (reference - problem.inputs).flatten(1)
            length = offset.norm(dim=1, keepdim=True)
            nearest = problem.inputs + (offset * (epsilon / length).clamp_max(1)).view(reference.shape)
            assert float((last - nearest).flatten(1).norm(dim=1).max()) <= 2.01 * size * epsilon + 1e-3
    way = (reference - steps[-1].points).flatten(1)
    start = (reference - steps[0].points).flatten(1)
    order = 2 if distance == "l2" else torch.inf
    assert bool((way.norm(order, dim=1) < start.norm(order, dim=1)).all())


@pytest.mark.parametrize("distance", ["l2", "linf", "cosine"])
@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("reference", ["nearest", "mean"])
def test_the_loss_is_the_one_stated(distance, weight, reference):
    problem = small_defense(6, epsilon=0.3, references=3)
    network, references = problem.defended.classifier, problem.target.references
    chosen = {"features": ["1", "2"], "distance": distance, "weight": weight, "reference": reference}
    steps = watched(FeatureMatching(**chosen, confidence=0.2, steps=4), problem)
    for row in range(6):
        layers = [network[:2], network[:3]]
        scales = [float(layer(references[row]).norm(dim=1).mean()) for layer in layers]

        def joined(x, layers=layers, scales=scales):
            return torch.cat([layer(x)[0] / scale for layer, scale in zip(layers, scales, strict=True)])

        known = [joined(references[row, number][None]) for number in range(3)]
        own = joined(problem.inputs[row][None])
        wanted = sum(known) / 3 if reference == "mean" else min(known, key=lambda one: float((one - own).norm()))

        def far(a, wanted=wanted):
            if distance == "l2":
                return float((a - wanted).norm() ** 2)
            if distance == "linf":
                return float((a - wanted).abs().max())
            return 1 - float(a @ wanted / a.norm() / wanted.norm())

        logits = network(problem.inputs[row][None])[0]
        for step in steps:
            expected = -far(joined(step.points[row][None])) / far(own)
            if weight:
                z = network(step.points[row][None])[0]
                others = [float(value) for label, value in enumerate(z) if label != int(problem.labels[row])]
                gained = min(max(others) - float(z[problem.labels[row]]), 0.2)
                expected += weight * gained / float(logits.max() - logits.min())
            assert float(step.loss[row]) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_the_gradient_is_that_of_the_loss():
    problem = small_defense(4, epsilon=0.3)
    steps = watched(FeatureMatching(features="2", steps=3, samples=2), problem)
    for step, after in pairwise(steps):
        expected = (step.points + 0.04 * problem.threat_model.epsilon * step.gradient.sign()).clamp(0, 1)
        epsilon = problem.threat_model.epsilon
        torch.testing.assert_close(after.points, expected.clamp(problem.inputs - epsilon, problem.inputs + epsilon))
        assert bool((after.loss > step.loss).float().mean() > 0.5)


class WithFeatures(Detector):
    """A detector with features of its own, without gradients of its score."""

    differentiable = False

    def features(self, x):
        return x.flatten(1)[:, :3] * 2

    def score_of(self, seen):
        return seen.inputs.detach().flatten(1).sum(1)


class WithNumber(Detector):
    """A detector of which ``features`` is something else."""

    features = 7

    def score_of(self, seen):
        return seen.inputs.flatten(1).sum(1)


def test_which_features_are_taken():
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    x = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(0))
    own, plain = WithFeatures(network), WithNumber(network)
    assert torch.equal(feature_map(own, None, x[:1])(x)[0], x.flatten(1)[:, :3] * 2)
    for detector in (own, plain):
        torch.testing.assert_close(feature_map(detector, "2", x[:1])(x)[0], network[:3](x))
    torch.testing.assert_close(feature_map(plain, None, x[:1])(x)[0], network[:3](x))
    first, second = feature_map(plain, ["1", "3"], x[:1])(x)
    torch.testing.assert_close(first, network[:2](x))
    torch.testing.assert_close(second, network(x))
    assert torch.equal(feature_map(own, identity, x[:1])(x)[0], x.flatten(1))
    unreadable = WithNumber(nn.Sequential(network, nn.Softmax(1)).eval())
    for error, message, detector, features in (
        (InvalidArgumentError, "got 9, expected names of layers", plain, ["9"]),
        (InvalidArgumentError, r"shape \(4,\) from features", plain, lambda x: x.flatten(1)[:, 0]),
        (AttackRefusedError, "name layers of the detector's classifier", unreadable, None),
    ):
        with pytest.raises(error, match=message):
            feature_map(detector, features, x[:1])(x)


def test_a_detector_without_gradients_is_passed_by_its_features():
    # Detected: sums above 6 of twelve values. Classified by the first value; references are far below on both.
    problem = small_defense(5, epsilon=0.3)
    detector = WithFeatures(Lambda(lambda x: (x.flatten(1)[:, :1] - 0.5) * torch.tensor([1, -1])))
    detector.threshold = torch.tensor(7.5)
    defended = Defended(detector.classifier, detector)
    inputs = torch.full_like(problem.inputs, 0.7)
    target = replace(problem.target, defended=defended, classes=2, references=torch.full((5, 1, 1, 3, 4), 0.1))
    changed = replace(problem, target=target, defended=defended, inputs=inputs, labels=torch.zeros(5).long())
    assert bool(detector.decide(inputs).all())
    out = attacked(FeatureMatching(features=identity, steps=60), changed)
    assert bool(changed.successes(out).all())
    # Three of the values are not enough.
    out = attacked(FeatureMatching(steps=60), changed)
    assert torch.equal(changed.successes(out), out.flatten(1).sum(1) <= 7.5)


def test_targeted_goes_to_the_class_aimed_at():
    problem = small_defense(20, epsilon=0.4)
    wide = replace(problem, threat_model=ThreatModel(norm="linf", epsilon=0.4), labels=(problem.labels + 1) % 4)
    network = problem.defended.classifier
    pool = torch.rand(500, 1, 3, 4, generator=torch.Generator().manual_seed(5))
    classes, passes = predicted(network, pool), ~problem.defended.decide(pool)[1]
    of_aim = torch.stack([pool[(classes == label) & passes][:2] for label in wide.labels])
    wide = replace(wide, target=replace(problem.target, references=of_aim))
    out = attacked(FeatureMatching(features="2", steps=60), wide, targeted=True)
    aimed, rejected = problem.defended.decide(out)
    assert int(((aimed == wide.labels) & ~rejected).sum()) >= 12
