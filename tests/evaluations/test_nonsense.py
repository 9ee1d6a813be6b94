"""Arguments that make no sense are refused by all four evaluations, at the door and by name."""

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext.core.errors import RobustExtError
from robust_ext.core.threat import ThreatModel

ATTACK = "robust_ext:APGD(steps=2)"
X = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def evaluate(name, *, epsilon=0.1, norm="linf", bounds=(0.0, 1.0), **keywords):
    """One evaluation of a small network on four samples."""
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    model = network()
    y = model(X).argmax(1)
    if name == "binarization_test":
        keywords = {"inner_points": 20, "minimum_samples": 0, "canaries": 0, **keywords}
        return robust_ext.binarization_test(model, ATTACK, X, threat_model, **keywords)
    if name == "mead":
        detector = keywords.pop("detectors", lambda x: x.flatten(1).std(1))
        return robust_ext.mead(model, ATTACK, X, y, threat_model, detectors=detector, resamples=0, **keywords)
    if name == "robust_accuracy":
        return robust_ext.robust_accuracy(model, ATTACK, X, y, threat_model, **keywords)
    return robust_ext.evaluate_defense(lambda x: x.round(), ATTACK, X, y, threat_model, classifier=model, **keywords)


EVALUATIONS = ("binarization_test", "mead", "robust_accuracy", "evaluate_defense")


@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 1e-30), ("linf", 1e-8), ("l2", 1e-6), ("l1", 5e-6)])
def test_epsilons_that_float32_does_not_resolve(name, norm, epsilon):
    with pytest.raises(RobustExtError, match=rf"epsilon: got {epsilon:g}, expected at least .* in {norm}: float32"):
        evaluate(name, norm=norm, epsilon=epsilon)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_same_calls_with_an_epsilon_that_makes_sense(name):
    assert evaluate(name).content["kind"]


@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize("ids", [5, "abcd", [0, 1, 2], [0, 0, 1, 2], [0, 1, 2, -1], [0, 1, 2, 2.5], [0, 1, 2, None], X])
def test_sample_ids(name, ids):
    with pytest.raises(RobustExtError, match=r"^sample_ids: got"):
        evaluate(name, sample_ids=ids)
