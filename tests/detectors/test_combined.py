"""Several detectors as one: against numpy, one forward pass, gradients, files, and what is refused."""

import numpy as np
import pytest
import torch

from robust_ext.core.errors import ModelError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector, FeatureSqueezingDetector, MagNetDetector, ScoreDetector
from robust_ext.detectors.combined import CombinedDetector
from robust_ext.detectors.combining import METHODS, combine
from robust_ext.evaluations.detectors import detector_digest
from robust_ext.models.defended import Defended
from tests.detectors import cases
from tests.detectors.cases import flat as network


class Unit(Detector):
    """The distance of one layer's mean to a number that is fitted."""

    def __init__(self, classifier, *, layer="1", power=1.0):
        super().__init__(classifier)
        self.layers, self.power = (layer,), power
        self.register_buffer("middle", torch.zeros(()))

    @property
    def settings(self):
        return {"layer": self.layers[0], "power": self.power}

    def fit(self, inputs):
        self.middle = inputs.mean()

    def score_of(self, observed):
        (found,) = observed.layers.values()
        return (found.mean(1) - self.middle).abs() ** self.power


class Noisy(Unit):
    """A score with noise, that hands no gradients on."""

    differentiable = False
    random = True

    def score_of(self, observed):
        return (super().score_of(observed) + torch.rand(len(observed.inputs))).detach()


def data(count, seed=0):
    return cases.data(count, seed, (2, 3)) * 4 - 1


def ready(classifier, members, clean, **chosen):
    detector = CombinedDetector(classifier, members, method=chosen.pop("method", "mean"))
    detector.fit_clean(clean, **chosen)
    return detector


def three(classifier):
    members = [Unit(classifier, layer="1"), Unit(classifier, layer="2", power=3), Unit(classifier, layer="1", power=2)]
    members[2].fit(data(10))
    return members


@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_numpy(method):
    classifier = network()
    members = three(classifier)
    detector = ready(classifier, members, data(50), method=method, batch_size=7)
    x = data(30, 1) * 3
    own = np.stack([member.score(x).detach().double().numpy() for member in members])
    clean = [member.score(data(50)).detach().double().numpy() for member in members]
    assert detector.clean.shape == (3, 50)
    found = detector.score(x)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.detach().numpy(), combine(own, clean, method=method), atol=2e-6)
    order = ready(classifier, members[::-1], data(50), method=method)
    torch.testing.assert_close(order.score(x), found, rtol=0, atol=2e-6)
    assert detector.score(x[:0]).shape == (0,)
    torch.testing.assert_close(detector.score(x[3:4]), found[3:4], rtol=0, atol=2e-6)
    assert detector.calibrate(data(100, 2), false_positive_rate=0.1).achieved == pytest.approx(0.1)
    assert detector.decide(x).tolist() == (found > detector.threshold).tolist()
    if torch.cuda.is_available():
        torch.testing.assert_close(detector.to("cuda").score(x.cuda()).cpu(), found)
        detector.cpu()
    # New clean scores forget the threshold.
    detector.fit_clean(data(30, 2))
    with pytest.raises(ModelError, match="has no threshold"):
        detector.decide(x)


def test_one_forward_pass_serves_all():
    classifier = network()
    calls = []
    classifier.register_forward_hook(lambda *_: calls.append(1))
    detector = CombinedDetector(classifier, three(classifier))
    assert detector.layers == ("1", "2")
    # Members move with the whole.
    assert {"modules_of_members.2.middle", "clean"} <= dict(detector.named_buffers()).keys()
    detector.fit_clean(data(20))
    assert len(calls) == 1
    detector.score(data(4))
    assert len(calls) == 2
    detector.calibrate(data(40, 1))
    calls.clear()
    Defended(classifier, detector, exposure="reject")(data(4))
    assert len(calls) == 1
    assert classifier.training is False


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_finite_differences(method):
    classifier = network().double()
    detector = ready(classifier, three(classifier), data(25).double(), method=method)
    assert detector.differentiable
    x = data(6, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(detector, x)
    assert float(torch.autograd.grad(detector.score(x).sum(), x)[0].abs().sum()) > 0


def test_members_decide_what_the_whole_is():
    classifier = network()
    plain, noisy = CombinedDetector(classifier, three(classifier)), CombinedDetector(classifier, [Noisy(classifier)])
    assert (plain.differentiable, plain.random) == (True, False)
    assert (noisy.differentiable, noisy.random) == (False, True)
    before = torch.random.get_rng_state()
    noisy.fit_clean(data(30), seed=4)
    first = noisy.clean
    noisy.fit_clean(data(30), seed=4)
    assert torch.equal(noisy.clean, first)
    assert torch.equal(torch.random.get_rng_state(), before)
    noisy.fit_clean(data(30), seed=5)
    assert not torch.equal(noisy.clean, first)
    mixed = CombinedDetector(classifier, [Noisy(classifier), ScoreDetector(classifier, lambda x: x.flatten(1).sum(1))])
    assert (mixed.differentiable, mixed.random) == (False, True)
    mixed.fit_clean(data(30))
    x = data(5).requires_grad_()
    assert bool((torch.autograd.grad(mixed.score(x).sum(), x)[0] != 0).any())


def test_nan_of_a_member_lets_nothing_pass():
    classifier = network()
    root = ScoreDetector(classifier, lambda x: x.flatten(1)[:, 0].sqrt(), name="root")
    detector = CombinedDetector(classifier, [root, *three(classifier)], method="max")
    with pytest.raises(ModelError, match=r"member 0 \(root\) scored \d+ of 50 clean inputs NaN .* leave it out"):
        detector.fit_clean(data(50))
    assert not detector.clean.numel()
    detector.fit_clean(data(50).abs())
    x = data(4).abs()
    x[2] = -x[2]
    assert detector.score(x).isnan().tolist() == [False, False, True, False]
    detector.calibrate(data(60, 1).abs())
    margins = detector.score_margin(x)
    assert detector.decide(x).tolist() == [bool(margin > 0) or place == 2 for place, margin in enumerate(margins)]


def test_infinite_scores_are_in_order():
    classifier = network()
    detector = CombinedDetector(classifier, [ScoreDetector(classifier, lambda x: 1 / x.flatten(1)[:, 0].relu())])
    x = torch.tensor([0.0, 0.01, 0.5, 3.0])[:, None].expand(4, 6).reshape(4, 2, 3)
    detector.fit_clean(data(40).abs())
    scores = detector.score(x)
    assert scores[0] == 1
    assert bool((scores.diff() < 0).all())
    with pytest.raises(ModelError, match=r"member 0 .*0 finite, expected none and at least one"):
        detector.fit_clean(torch.zeros(5, 2, 3))


def test_saving_and_loading(tmp_path):
    classifier, inputs = digits_network(), load_dataset("digits", split="train").take(range(120))[0]
    magnet = MagNetDetector(classifier)
    magnet.fit(inputs, epochs=1)
    squeezing = FeatureSqueezingDetector(classifier, squeezers=[("median", {"size": 2})])
    inner = ready(classifier, [squeezing, Unit(classifier, layer="5", power=2)], inputs, method="mixture")
    detector = ready(classifier, [magnet, inner], inputs[:60], method="max")
    detector.calibrate(inputs[60:])
    path = tmp_path / "combined.safetensors"
    detector.save(path)
    again = CombinedDetector.load(path, classifier, kinds=[Unit])
    assert torch.equal(again.score(inputs), detector.score(inputs))
    assert torch.equal(again.threshold, detector.threshold)
    assert again.settings == detector.settings
    assert [type(member) for member in again.members] == [MagNetDetector, CombinedDetector]
    assert all(member.classifier is classifier for member in again.members)
    assert path.stat().st_size < 40_000
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert detector_digest(detector) == detector_digest(again)
    assert detector_digest(detector) != detector_digest(inner)
