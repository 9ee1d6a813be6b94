"""Attacks that imitate references by features or logits: what they pull where, and under which noise."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from scipy.stats import kstest
from torch import nn

from robust_ext.attacks.feature_matching import FeatureMatching, feature_map
from robust_ext.attacks.logit_matching import LogitMatching, _draw
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError, RobustExtWarning
from robust_ext.core.threat import ThreatModel
from robust_ext.detectors import Detector
from robust_ext.models.defended import Defended
from tests.attacks.defenses import Rowwise, small_defense
from tests.attacks.problems import Lambda, attacked, predicted, watched

in_references = pytest.mark.parametrize("reference", ["nearest", "mean"])


def identity(x):
    return x.flatten(1)


def wanted_of(known, own, reference):
    """What is imitated: of the references the nearest, or their mean."""
    return sum(known) / len(known) if reference == "mean" else min(known, key=lambda one: float((one - own).norm()))


def gained_of(z, label):
    z = z.tolist()
    return max(value for k, value in enumerate(z) if k != label) - z[label]


@in_references
@pytest.mark.parametrize(
    "made",
    [FeatureMatching(steps=5), FeatureMatching(features="2", distance="cosine", steps=5), LogitMatching(steps=5)],
)
def test_references_of_the_inputs_own_class_are_not_imitated(made, reference):
    made, problem = replace(made, reference=reference), small_defense(6, references=2)
    own, others = problem.inputs[:, None], problem.target.references

    def beside(references):
        return replace(problem, target=replace(problem.target, references=references))

    mixed = beside(torch.cat([own, others, own + 1e-3], 1))
    torch.testing.assert_close(attacked(made, mixed), attacked(made, problem), rtol=0, atol=1e-4)
    with pytest.raises(AttackError, match="none of the references of another class"):
        attacked(made, beside(own))
    with pytest.warns(RobustExtWarning, match="for some inputs"):
        attacked(made, beside(torch.cat([own[:2], others[2:, :1]])))


FAR = {
    "l2": lambda a, b: float((a - b).norm() ** 2),
    "linf": lambda a, b: float((a - b).abs().max()),
    "cosine": lambda a, b: 1 - float(a @ b / a.norm() / b.norm()),
}


def joined(x, scaled):
    return torch.cat([layer(x[None])[0] / scale for layer, scale in scaled])


@pytest.mark.parametrize("distance", FAR)
@pytest.mark.parametrize("weight", [0.0, 1.0])
@in_references
def test_the_loss_of_features_is_the_one_stated(distance, weight, reference):
    problem = small_defense(6, epsilon=0.3, references=3)
    network, references = problem.defended.classifier, problem.target.references
    chosen = {"features": ["1", "2"], "distance": distance, "weight": weight, "reference": reference}
    steps = watched(FeatureMatching(**chosen, confidence=0.2, steps=4), problem)
    for row, label in enumerate(problem.labels.tolist()):
        scaled = [(layer, layer(references[row]).norm(dim=1).mean()) for layer in (network[:2], network[:3])]
        known, own = [joined(x, scaled) for x in references[row]], joined(problem.inputs[row], scaled)
        wanted, logits = wanted_of(known, own, reference), network(problem.inputs[row][None])[0]
        for step in steps:
            here = joined(step.points[row], scaled)
            expected = -FAR[distance](here, wanted) / FAR[distance](own, wanted)
            gained = min(gained_of(network(step.points[row][None])[0], label), 0.2)
            expected += weight * gained / float(logits.max() - logits.min())
            assert float(step.loss[row]) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_the_gradient_is_that_of_the_loss():
    problem = small_defense(4, epsilon=0.3)
    epsilon = problem.threat_model.epsilon
    for step, after in pairwise(watched(FeatureMatching(features="2", steps=3, samples=2), problem)):
        expected = (step.points + 0.04 * epsilon * step.gradient.sign()).clamp(0, 1)
        torch.testing.assert_close(after.points, expected.clamp(problem.inputs - epsilon, problem.inputs + epsilon))
        assert bool((after.loss > step.loss).float().mean() > 0.5)


class WithFeatures(Detector):
    """A detector with features of its own, without gradients of its score."""

    differentiable = False

    def features(self, x):
        return x.flatten(1)[:, :3] * 2

    def score_of(self, seen):
        return seen.inputs.detach().flatten(1).sum(1)


class WithNumber(WithFeatures):
    """A detector of which ``features`` is something else."""

    features = 7


def test_which_features_are_taken():
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    x = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(0))
    own, plain = WithFeatures(network), WithNumber(network)
    for detector, features, expected in (
        (own, None, [x.flatten(1)[:, :3] * 2]),
        (own, "2", [network[:3](x)]),
        (own, identity, [x.flatten(1)]),
        (plain, "2", [network[:3](x)]),
        (plain, None, [network[:3](x)]),
        (plain, ["1", "3"], [network[:2](x), network(x)]),
    ):
        torch.testing.assert_close(list(feature_map(detector, features, x[:1])(x)), expected)
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
    assert bool(changed.successes(attacked(FeatureMatching(features=identity, steps=60), changed)).all())
    # Three of the values are not enough.
    out = attacked(FeatureMatching(steps=60), changed)
    assert torch.equal(changed.successes(out), out.flatten(1).sum(1) <= 7.5)


def other_classifier(rows):
    """A classifier that is not the network that the detector watches."""
    problem = small_defense(rows, epsilon=0.3, references=3)
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(3))
    defended = Defended(nn.Sequential(nn.Flatten(), Rowwise(weight), nn.Tanh()).eval(), problem.defended.detector)
    target = replace(problem.target, defended=defended, classes=3)
    return replace(problem, target=target, labels=problem.labels % 3, defended=defended)


@pytest.mark.parametrize("logits", ["classifier", "detector", "both"])
@in_references
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_the_loss_of_logits_without_noise_is_the_one_stated(logits, reference, targeted, same):
    problem = small_defense(5, epsilon=0.3, references=3) if same else other_classifier(5)
    chosen = {"logits": logits, "reference": reference, "margin_weight": 0.7, "confidence": 0.1}
    steps = watched(LogitMatching(**chosen, level=0, samples=1, steps=6), problem, targeted=targeted)
    classifier, network = problem.defended.classifier, problem.defended.detector.classifier
    both = {"classifier": [classifier], "detector": [network], "both": [classifier, network]}
    parts = [classifier] if same else both[logits]

    def matched(x):
        return torch.cat([part(x[None])[0] for part in parts])

    for row, label in enumerate(problem.labels.tolist()):
        references = problem.target.references[row]
        right = (predicted(classifier, references) == label) == targeted
        known = [matched(point) for point in references[right if bool(right.any()) else slice(None)]]
        wanted = wanted_of(known, matched(problem.inputs[row]), reference)
        for step in steps:
            gained = gained_of(classifier(step.points[row][None])[0], label)
            expected = 0.7 * min(-gained if targeted else gained, 0.1)
            expected -= float((matched(step.points[row]) - wanted).square().sum()) / 2
            assert float(step.loss[row]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0)])
@pytest.mark.parametrize(("noise", "variance"), [("normal", 1.0), ("uniform", 1 / 3), ("sign", 1.0)])
def test_the_loss_is_averaged_over_the_noise(bounds, noise, variance):
    """With a linear network, noise of variance v adds v times the squared weights to the squared distance."""
    problem, width = small_defense(16, bounds=bounds), bounds[1] - bounds[0]
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(3))
    linear = nn.Sequential(nn.Flatten(), Rowwise(weight)).eval()
    detector = type(problem.defended.detector)(nn.Sequential(linear, nn.Identity(), nn.Identity()).eval())
    detector.threshold = torch.tensor(1e9)
    defended, middle = Defended(linear, detector), torch.full_like(problem.inputs, sum(bounds) / 2)
    target = replace(problem.target, defended=defended, classes=3, references=middle[:, None] + 0.1)
    parts = {"target": target, "defended": defended, "inputs": middle, "labels": torch.zeros(16, dtype=torch.int64)}
    changed = replace(problem, **parts, threat_model=ThreatModel(norm="linf", epsilon=0.05, bounds=bounds))
    chosen = {"logits": "classifier", "samples": 250, "steps": 1, "margin_weight": 0, "start": "input"}
    (step,) = watched(LogitMatching(**chosen, noise=noise, level=0.05), changed)
    plain = (torch.full((16, 12), -0.1) @ weight.T).square().sum(1)
    expected = -(plain + variance * (0.05 * width) ** 2 * weight.square().sum()) / 2
    # The rows are the same and draw each its own noise.
    torch.testing.assert_close(step.loss.mean(), expected.mean(), rtol=0.03, atol=1e-4)
    torch.testing.assert_close(step.loss, expected, rtol=0.15, atol=1e-4)
    drawn = _draw((2000,), noise, torch.Generator().manual_seed(0))
    if noise == "sign":
        assert drawn.unique().tolist() == [-1, 1]
    else:
        shape = ("norm",) if noise == "normal" else ("uniform", (-1, 2))
        assert kstest(drawn.numpy(), *shape).pvalue > 1e-3
