import pytest
import torch
from torch import nn

from robust_ext.detectors import Detector
from robust_ext.models.defended import Defended, SuccessMargin
from robust_ext.models.features import LayerInput
from tests.models.cases import data, network, planted

INVERTED = pytest.mark.parametrize("inverted", [False, True])


class Hidden(Detector):
    """The first hidden unit."""

    layers = ("1",)

    def score_of(self, seen):
        return seen.layers["1"][:, 0]


@pytest.fixture
def classifier():
    return network(width=5)


@pytest.fixture
def detector(classifier):
    made = Hidden(classifier)
    made.calibrate(data(100), false_positive_rate=0.3)
    return made


@INVERTED
def test_one_pass_serves_both(inverted, classifier, detector):
    x, calls = data(4), []
    classifier.register_forward_hook(lambda _module, args, _out: calls.append(len(args[0])))
    expected = (-1 if inverted else 1) * (classifier[1](x.flatten(1))[:, 0] - detector.threshold)
    for head in (classifier, planted(LayerInput(classifier, "3"), x, size=5)):
        calls.clear()
        logits, excess = Defended(head, detector, inverted=inverted).both(x)
        assert calls == [4]
        torch.testing.assert_close(logits, head(x))
        torch.testing.assert_close(excess, expected)


def test_other_networks_are_run_beside(detector):
    # A network that is queried twice, for noise too, is not mistaken for one pass.
    class Twice(nn.Module):
        def forward(self, x):
            return detector.classifier(x) + detector.classifier(x * 0.5)

    x = data(4)
    for other in (nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), Twice()):
        logits, excess = Defended(other, detector).both(x)
        torch.testing.assert_close(logits, other(x))
        torch.testing.assert_close(excess, detector.score_margin(x))
    assert not detector.classifier._forward_hooks


def test_decisions_are_the_detectors_and_win_the_column_of_rejection(classifier, detector):
    x = data(100)
    predicted, rejected = Defended(classifier, detector).decide(x)
    assert torch.equal(predicted, classifier(x).argmax(1))
    assert torch.equal(rejected, detector.decide(x))
    assert int(rejected.sum()) == 30
    # The input whose score is the threshold itself is let pass, and is the one that the inverted test rejects.
    assert len(x[(detector.score(x) == detector.threshold)]) == 1
    assert torch.equal(Defended(classifier, detector, inverted=True).decide(x)[1], ~rejected)
    logits = Defended(classifier, detector, exposure="reject", weight=3.0)(x)
    assert logits.shape == (100, 4)
    assert torch.equal(logits[:, :3], classifier(x))
    assert torch.equal(logits.argmax(1) == 3, rejected)
    assert torch.equal(Defended(classifier, detector)(x), classifier(x))


@INVERTED
def test_the_margin_is_positive_exactly_on_success(inverted, classifier, detector):
    defended, x = Defended(classifier, detector, inverted=inverted), data(200)
    labels = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(3))
    predicted, rejected = defended.decide(x)
    success = (predicted != labels) & ~rejected
    assert 0 < int(success.sum()) < 200
    assert torch.equal(SuccessMargin(defended, labels)(x).argmax(1) == 1, success)
    zeros = SuccessMargin(defended, 0)
    assert torch.equal(zeros(x[:7]).argmax(1) == 1, ((predicted != 0) & ~rejected)[:7])
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(zeros(x)[:, 1].sum(), x)
    assert bool((gradient.flatten(1).abs().sum(1) > 0).all())


class Root(Detector):
    """NaN where the first value is negative, infinite where it is 0."""

    def score_of(self, seen):
        first = seen.inputs.flatten(1)[:, 0]
        return first.sqrt() - torch.where(first == 0, torch.inf, 0.0)


@INVERTED
def test_scores_of_nan_let_nothing_pass_and_leave_logits_finite(inverted, classifier):
    detector, x = Root(classifier), data(4).abs()
    detector.threshold = torch.tensor(0.5)
    x.flatten(1)[:, 0] = torch.tensor([-1.0, 0.0, 0.04, 0.64])
    shown = Defended(classifier, detector, inverted=inverted, exposure="reject")
    assert detector.decide(x).tolist() == [True, False, False, True]
    rejected = [True, *([True, True, False] if inverted else [False, False, True])]
    assert shown.decide(x)[1].tolist() == rejected
    # In the margin, each is misclassified.
    margin = SuccessMargin(shown, (classifier(x).argmax(1) + 1) % 3)
    for logits, winner in ((shown(x), 3), (margin(x), 0)):
        assert (logits.argmax(1) == winner).tolist() == rejected
        assert torch.isfinite(logits).all()
