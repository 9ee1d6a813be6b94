"""Logit matching: whose logits, under which noise."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import kstest
from torch import nn

from robust_ext.attacks.logit_matching import LogitMatching, _draw
from robust_ext.core.threat import ThreatModel
from robust_ext.models.defended import Defended
from tests.attacks.defenses import Rowwise, small_defense
from tests.attacks.problems import predicted, watched


def two_networks(rows):
    """A classifier that is not the network that the detector watches."""
    problem = small_defense(rows, epsilon=0.3, references=3)
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(3))
    other = nn.Sequential(nn.Flatten(), Rowwise(weight), nn.Tanh()).eval()
    defended = Defended(other, problem.defended.detector)
    target = replace(problem.target, defended=defended, classes=3)
    return replace(problem, target=target, labels=problem.labels % 3, defended=defended)


@pytest.mark.parametrize("logits", ["classifier", "detector", "both"])
@pytest.mark.parametrize("reference", ["nearest", "mean"])
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_the_loss_without_noise_is_the_one_stated(logits, reference, targeted, same):
    problem = small_defense(5, epsilon=0.3, references=3) if same else two_networks(5)
    chosen = {"logits": logits, "reference": reference, "margin_weight": 0.7, "confidence": 0.1}
    steps = watched(LogitMatching(**chosen, level=0, samples=1, steps=6), problem, targeted=targeted)
    references = problem.target.references
    classifier, network = problem.defended.classifier, problem.defended.detector.classifier
    both = {"classifier": [classifier], "detector": [network], "both": [classifier, network]}
    parts = [classifier] if same else both[logits]
    for row in range(5):

        def matched(x):
            return torch.cat([part(x[None])[0] for part in parts])

        right = (predicted(classifier, references[row]) == problem.labels[row]) == targeted
        known = [matched(point) for point in references[row][right if bool(right.any()) else slice(None)]]
        own = matched(problem.inputs[row])
        wanted = (
            sum(known) / len(known) if reference == "mean" else min(known, key=lambda one: float((one - own).norm()))
        )
        for step in steps:
            z, label = classifier(step.points[row][None])[0].tolist(), int(problem.labels[row])
            gained = max(value for k, value in enumerate(z) if k != label) - z[label]
            gained = min(-gained if targeted else gained, 0.1)
            expected = 0.7 * gained - float((matched(step.points[row]) - wanted).square().sum()) / 2
            assert float(step.loss[row]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0)])
def test_the_loss_is_averaged_over_the_noise(bounds):
    """With a linear network, noise of variance v adds v times the squared weights to the squared distance."""
    problem = small_defense(16, bounds=bounds)
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(3))
    linear = nn.Sequential(nn.Flatten(), Rowwise(weight)).eval()
    detector = type(problem.defended.detector)(nn.Sequential(linear, nn.Identity(), nn.Identity()).eval())
    detector.threshold = torch.tensor(1e9)
    defended = Defended(linear, detector)
    width = bounds[1] - bounds[0]
    middle = torch.full_like(problem.inputs, sum(bounds) / 2)
    target = replace(problem.target, defended=defended, classes=3, references=middle[:, None] + 0.1)
    parts = {"target": target, "defended": defended, "inputs": middle, "labels": torch.zeros(16, dtype=torch.int64)}
    changed = replace(problem, **parts, threat_model=ThreatModel(norm="linf", epsilon=0.05, bounds=bounds))
    for noise, variance in (("normal", 1.0), ("uniform", 1 / 3), ("sign", 1.0)):
        level, chosen = 0.05, {"logits": "classifier", "samples": 250, "steps": 1, "margin_weight": 0, "start": "input"}
        made = LogitMatching(**chosen, noise=noise, level=level)
        (step,) = watched(made, changed)
        plain = ((middle - middle - 0.1).flatten(1) @ weight.T).square().sum(1)
        expected = -(plain + variance * (level * width) ** 2 * weight.square().sum()) / 2
        # The rows are the same and draw each its own noise.
        torch.testing.assert_close(step.loss.mean(), expected.mean(), rtol=0.03, atol=1e-4)
        torch.testing.assert_close(step.loss, expected, rtol=0.15, atol=1e-4)
        assert made.traits.leaves_ball
    assert not LogitMatching(level=0).traits.leaves_ball


def test_noise_is_of_the_kind_chosen():
    generator = torch.Generator().manual_seed(0)
    assert kstest(_draw((2000,), "normal", generator).numpy(), "norm").pvalue > 1e-3
    assert kstest(_draw((2000,), "uniform", generator).numpy() / 2 + 0.5, "uniform").pvalue > 1e-3
    signs = _draw((2000,), "sign", generator)
    assert sorted(signs.unique().tolist()) == [-1, 1]
    assert abs(float(signs.mean())) < 0.1
