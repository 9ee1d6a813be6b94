"""Whatever detects becomes a detector: objects, scores, factories, text, and detectors of other libraries."""

import copy
import functools
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.detectors import Detector
from robust_ext.registry.detector import as_detector
from tests.adapters.common import art_classifier
from tests.detectors import cases
from tests.detectors.cases import weighted


class Largest(Detector):
    def __init__(self, classifier, *, factor=1.0):
        super().__init__(classifier)
        self.factor = factor

    def score_of(self, seen):
        return -seen.logits.amax(1) * self.factor


def brightness(x):
    return x.flatten(1).mean(1)


network = functools.partial(
    weighted, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
)
data = functools.partial(cases.data, shape=(1, 8, 8))


def test_a_detector_is_returned_if_it_watches_the_classifier():
    classifier, x = network(), data(4)
    detector = Largest(classifier)
    assert as_detector(detector, classifier) is detector
    same = copy.deepcopy(classifier)
    assert as_detector(detector, same, inputs=x) is detector
    with pytest.raises(InvalidArgumentError, match="detector: got Largest beside another module, Sequential, expected"):
        as_detector(detector, same)
    for other in (network(seed=1), nn.Sequential(nn.Flatten(), nn.Linear(64, 5)).eval()):
        with pytest.raises(InvalidArgumentError, match="guard: got Largest beside a classifier with other logits"):
            as_detector(detector, other, inputs=x, argument="guard")


def test_a_score_is_wrapped_and_states_what_it_is():
    classifier, x = network(), data(60)
    detector = as_detector(brightness, classifier)
    assert detector.calibrate(x).achieved == pytest.approx(0.05)
    assert (detector.differentiable, detector.random) == (True, False)
    (gradient,) = torch.autograd.grad(detector.score(x.requires_grad_()).sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 1 / 64))

    def score(x):
        return torch.from_numpy(x.numpy().mean((1, 2, 3))) + torch.rand(())

    score.differentiable, score.random = False, True
    detector = as_detector(score, classifier)
    assert (detector.differentiable, detector.random) == (False, True)
    assert not detector.score(data(2).requires_grad_()).requires_grad
    with pytest.raises(ModelError, match=r"returned shape \(2, 3\) for 2 inputs"):
        as_detector(classifier, classifier).score(data(2))


def test_modules_move_along_and_code_is_not_saved(tmp_path):
    detector = as_detector(nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0)).eval(), network())
    detector.threshold = torch.tensor(0.25)
    assert detector.double().scorer[1].weight.dtype == torch.float64
    with pytest.raises(ModelError, match=r"Sequential: wraps code of yours.*torch\.tensor\(0\.25\)"):
        detector.save(tmp_path / "no.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_factory_is_called_with_the_classifier():
    classifier, x = network(), data(5)
    for factory, factor in (
        (Largest, 1),
        (functools.partial(Largest, factor=2.0), 2),
        (lambda classifier: Largest(classifier, factor=2.0), 2),
        (lambda model: lambda x: -model(x).amax(1) * 2, 2),
    ):
        detector = as_detector(factory, classifier)
        assert detector.classifier is classifier
        torch.testing.assert_close(detector.score(x), -classifier(x).amax(1) * factor)


FILE = """
NAME = "text"

def with_factor(factor):
    return lambda model: lambda x: -model(x).amax(1) * factor

def score(x):
    return x.flatten(1).amax(1)
"""


def test_text_names_any_of_these(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    classifier, x = network(), data(3)
    expected = {"with_factor(factor=3.0)": -3 * classifier(x).amax(1), "score": x.flatten(1).amax(1)}
    for name, scores in expected.items():
        torch.testing.assert_close(as_detector(f"{tmp_path}/mine.py:{name}", classifier).score(x), scores)
    named = as_detector("torch.special:entr", classifier)
    with pytest.raises(ModelError, match="for 2 inputs, expected one floating point score"):
        named.score(x[:2])
    for text, message in [
        (f"{tmp_path}/mine.py:NAME", "it names a string"),
        (f"{tmp_path}/mine.py:nothing", "a name that .* defines"),
        (f"{tmp_path}/none.py:make", "an existing Python file"),
        ("nonsense", "detector: got 'nonsense', expected scope:name"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            as_detector(text, classifier)
    (tmp_path / "bad.py").write_text("raise ValueError('no')")
    with pytest.raises(DataError, match="detector: importing"):
        as_detector(f"{tmp_path}/bad.py:make", classifier)


def test_pytorch_ood_scores_are_taken_as_they_are():
    """Its ``predict``, which a call leads to, is higher for outliers."""

    class Energy:
        def __init__(self, model):
            self.model = model

        def predict(self, x):
            return -torch.logsumexp(self.model(x), 1)

    Energy.__module__ = "pytorch_ood.detector"
    classifier, x = network(), data(7)
    for obj in (Energy(classifier), Energy):
        detector = as_detector(obj, classifier)
        torch.testing.assert_close(detector.score(x), -classifier(x).logsumexp(1))
        assert detector.name == "Energy"
    Energy.__module__ = "elsewhere"
    with pytest.raises(InvalidArgumentError, match="got Energy, expected a Detector"):
        as_detector(Energy(classifier), classifier)


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("robust_ext.adapters.art.library", reason="ART is not installed")
    return importlib.import_module("art.defences.detector.evasion")


def adapt(detector, classifier):
    return importlib.import_module("robust_ext.adapters.art.detector").adapt_detector(detector, classifier)


def wrapped(module, *, shape, classes):
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    return art_classifier(module, shape, classes, optimizer=optimizer, clip_values=None)


def art_detectors(theirs, classifier):
    """Each of ART's detectors for torch, fitted to tell bright noise from dark."""
    clean, bad = data(80).numpy() * 0.5, data(80, 1).numpy() * 0.5 + 0.5
    both, kinds = np.concatenate([clean, bad]), np.eye(2, dtype=np.float32)[np.repeat([0, 1], 80)]
    estimator = wrapped(classifier, shape=(1, 8, 8), classes=3)
    pixels = wrapped(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), shape=(1, 8, 8), classes=2)
    by_input = theirs.BinaryInputDetector(pixels)
    units = wrapped(nn.Sequential(nn.Linear(16, 2)), shape=(16,), classes=2)
    by_units = theirs.BinaryActivationDetector(estimator, units, layer=2)
    for detector in (by_input, by_units):
        detector.fit(both, kinds, nb_epochs=15, batch_size=32)
    classifier.eval()
    learner = nn.Module()
    learner.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    learner.classifier, learner.projector = nn.Linear(8, 3), nn.Linear(8, 4)
    augmented = {"augmentations": lambda x: x + 0.1 * torch.randn_like(x), "aug_num": 6, "var_K": 3}
    neighbours = theirs.BeyondDetectorPyTorch(estimator, SimpleNamespace(model=learner), **augmented)
    neighbours.fit(clean, None)
    scan = theirs.SubsetScanningDetector(estimator, clean, layer=2, verbose=False)
    return {"input": by_input, "activation": by_units, "scan": scan, "beyond": neighbours}


@pytest.mark.parametrize("kind", ["input", "activation", "scan", "beyond"])
def test_art_detectors_decide_as_art_does(theirs, kind):
    classifier = network()
    x = torch.cat([data(30, 5) * 0.5, data(30, 6) * 0.5 + 0.5])

    def seeded(call, inputs, seed=1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return call(inputs)

    original = seeded(lambda classifier: art_detectors(theirs, classifier), classifier, seed=0)[kind]
    detector = adapt(original, classifier)
    report, decided = seeded(original.detect, x.numpy())
    decisions, scores = seeded(detector.decide, x), seeded(detector.score, x.clone().requires_grad_())
    assert decisions.tolist() == np.asarray(decided).tolist()
    if kind in ("input", "activation"):
        assert 20 < sum(decided[30:]) > sum(decided[:30])
        expected = report["predictions"][:, 1] - report["predictions"][:, 0]
    elif kind == "scan":
        assert sum(decided) > 0
        expected = report["scores"] - original.bgd_scores.max()
    else:
        expected = original.threshold - report
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert (scores.requires_grad, detector.differentiable, detector.random) == (False, False, kind == "beyond")
    assert detector.score(x[:0]).shape == (0,)
    hooks = [len(part._forward_hooks) for part in classifier.modules()]
    detector.score(x)
    assert [len(part._forward_hooks) for part in classifier.modules()] == hooks


def test_art_detectors_of_another_network_are_refused(theirs):
    found = art_detectors(theirs, network())
    for kind in ("activation", "scan", "beyond"):
        with pytest.raises(InvalidArgumentError, match="beside another network, Sequential, expected one made with an"):
            adapt(found[kind], network())
    inside = nn.Sequential(found["scan"].classifier.model).eval()
    assert adapt(found["scan"], inside).classifier is inside


def own_detector(theirs, report):
    class Own(theirs.EvasionDetector):
        def fit(self, x, y, batch_size=128, nb_epochs=20, **kwargs):
            pass

        def detect(self, x, batch_size=128, **kwargs):
            return report(x)

    return adapt(Own(), network())


def test_art_detectors_of_ones_own(theirs):
    x = data(6)
    middle = float(x.mean((1, 2, 3)).median())
    decided = own_detector(theirs, lambda a: ({}, a.mean((1, 2, 3)) > middle))
    assert torch.equal(decided.decide(x), x.mean((1, 2, 3)) > middle)
    assert set(decided.score(x).tolist()) == {0.5, -0.5}
    several = own_detector(theirs, lambda a: ({"predictions": np.array([[1, 0, 2], [3, 0, 2.0]])}, [True, False]))
    assert several.score(x[:2]).tolist() == [1, -1]
    for report in (lambda a: ({"predictions": np.array([[0.9, 0.1]] * len(a))}, [True] * len(a)), lambda a: ({}, [1])):
        with pytest.raises(ModelError, match="ART Own: its report and its decisions contradict each other; hand over"):
            own_detector(theirs, report).score(x)
