"""Detectors by name: what they are trained on, by which constants, and what comes back; and layers that are found."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from robust_ext.core.errors import SplitError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors import KDBUDetector, LIDDetector, MagNetDetector, NSSDetector, observe
from robust_ext.detectors._features.layers import activation_layers, hidden_layer
from robust_ext.detectors.catalogue import DETECTORS
from robust_ext.engine.executors import LocalExecutor
from robust_ext.engine.running import attack_worker
from robust_ext.evaluations.mead.fitting import (
    NAMED,
    find_detectors,
    fit_detector,
    load_detector,
    training_adversarials,
)
from tests.detectors.cases import data, weighted

images = partial(data, shape=(1, 8, 8))


def small(channels=1):
    parts = partial(nn.Conv2d, channels, 4, 3), nn.Tanh, nn.Flatten, partial(nn.Linear, 144, 6), nn.Tanh
    return weighted(lambda: nn.Sequential(*(part() for part in parts), nn.Linear(6, 3)))


def problem(count, channels=1):
    """Images, labels of three classes, and images in place of adversarial ones."""
    clean = data(count, shape=(channels, 8, 8))
    return clean, torch.arange(count) % 3, (clean + 0.1 * (data(count, 3, (channels, 8, 8)) - 0.5).sign()).clamp(0, 1)


QUICK = {"kd-bu": {"passes": 8}, "lid": {"neighbours": 10, "size": 30}, "magnet": {"epochs": 1}}


@pytest.mark.parametrize("name", NAMED)
def test_it_is_calibrated_by_its_user_and_comes_back_from_a_file(tmp_path, name):
    classifier, (clean, labels, adversarial), path = small(), problem(90), tmp_path / "detector.safetensors"
    detector = fit_detector(name, classifier, clean, labels, adversarial=adversarial, **QUICK.get(name, {}))
    assert bool(detector.threshold.isnan())
    assert 0 < detector.calibrate(images(60, 4), false_positive_rate=0.1).achieved <= 0.1
    detector.save(path)
    again = load_detector(name, path, classifier)
    assert (type(again), again.settings, again.threshold) == (DETECTORS[name], detector.settings, detector.threshold)


def same(one, other):
    a, b = (
        {key: value for key, value in each.state_dict().items() if not key.startswith("classifier.")}
        for each in (one, other)
    )
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) or bool(a[key].isnan().all()) for key in a)


def test_fits_are_those_of_the_classes():
    classifier, (clean, labels, adversarial) = small(), problem(90)
    fit = partial(fit_detector, classifier=classifier, clean=clean, labels=labels)
    nss = NSSDetector(classifier)
    nss.fit(clean, adversarial)
    assert same(fit("nss", adversarial=adversarial), nss)
    # The first 40 rows are trained on, and the others are references.
    lid = LIDDetector(classifier, layers=["1", "4", "5"], neighbours=20, size=30)
    lid.fit(clean[:40], adversarial[:40], references=clean[40:], folds=3, seed=2)
    found = fit("lid", adversarial=adversarial[:40], size=30, folds=3, seed=2)
    assert found.layers == ("1", "4", "5")
    assert same(found, lid)
    density = KDBUDetector(classifier, layer="4", bandwidth=0.7)
    density.fit(clean[:40], adversarial[:40], references=clean[40:], labels=labels[40:], folds=3, seed=2)
    found = fit("kd-bu", adversarial=adversarial[:40], bandwidth=0.7, folds=3, seed=2)
    assert found.layers == ("4",)
    assert same(found, density)
    autoencoders = MagNetDetector.preset("mnist", classifier, epochs=2)
    autoencoders.fit(clean, batch_size=16, learning_rate=1e-3, seed=3)
    assert same(fit("magnet", seed=3, epochs=2, batch_size=16, learning_rate=1e-3), autoencoders)
    # Too few other rows are no references.
    density = KDBUDetector(classifier, layer="4")
    density.fit(clean[:70], adversarial[:70], labels=labels[:70], seed=1)
    assert same(fit("kd-bu", adversarial=adversarial[:70], seed=1), density)


@pytest.mark.parametrize(
    ("channels", "preset", "mnist"), [(1, "auto", True), (3, "auto", False), (1, "cifar10", False)]
)
def test_presets_are_the_papers(channels, preset, mnist):
    if not mnist:
        pytest.importorskip("cv2")
    clean, labels, adversarial = problem(60, channels)
    given = {"clean": clean, "labels": labels, "preset": preset, "adversarial": adversarial}
    fit = partial(fit_detector, classifier=small(channels), **given)
    density = fit("kd-bu")
    assert (density.bandwidth, density.passes) == (1.2 if mnist else 0.26, 50)
    assert fit("kd-bu", bandwidth=3).bandwidth == 3
    assert fit("lid", size=40).neighbours == (20 if mnist else 30)
    squeezers = fit("fs").squeezers
    assert [one.kind for one in squeezers] == ["bit_depth", "median"] + ["opencv_non_local_means"] * (not mnist)
    assert squeezers[0].bits == (1 if mnist else 5)
    magnet = fit("magnet", epochs=1)
    assert magnet.structures == (((3, "average", 3), (3,)) if mnist else ((3,),))
    assert (magnet.powers, magnet.temperatures) == (((2, 1), ()) if mnist else ((1,), (10, 40)))
    assert magnet.noise == (0.1 if mnist else 0.025)
    machine = fit("nss")
    assert (machine.penalty, machine.gamma) == (10, 0.01)


def test_training_adversarials_rise_to_corners_of_the_ball():
    low, width, classifier = -2.0, 2.5, digits_network()
    clean = load_dataset("digits").take(range(40))[0] * width + low
    shift = nn.Conv2d(1, 1, 1)
    shift.weight.data, shift.bias.data = torch.full((1, 1, 1, 1), 1 / width), torch.tensor([-low / width])
    model = nn.Sequential(shift, classifier).eval()
    labels = model(clean).argmax(1)
    found = training_adversarials(model, clean, labels, epsilon=0.1, bounds=(low, low + width), batch_size=16)
    assert low <= float(found.min()) <= float(found.max()) <= low + width
    distance = (found - clean).abs().flatten(1).amax(1)
    torch.testing.assert_close(distance, torch.full((40,), 0.1 * width), rtol=1e-4, atol=0)
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), labels, reduction="none") for x in (clean, found)]
    assert bool((losses[1] > losses[0]).all())


def test_training_adversarials_do_not_depend_on_batches_and_leave_no_trace():
    classifier, clean, labels = small(), images(7), torch.arange(7) % 3
    # So steep that ascent ends elsewhere from another start.
    classifier[0].weight.data.mul_(10)
    drawn, make = torch.get_rng_state(), partial(training_adversarials, classifier)
    whole = make(clean, labels, seed=2)
    for again, rows in (
        (make(clean, labels, seed=2, batch_size=3), whole),
        (make(clean[3:], labels[3:], seed=2, start=3), whole[3:]),
        (make(clean[:1], labels[:1], seed=2), whole[:1]),
    ):
        torch.testing.assert_close(again, rows, rtol=0, atol=1e-6)
    assert not torch.equal(make(clean, labels, seed=3), whole)
    assert make(clean[:0], labels[:0]).shape == (0, 1, 8, 8)
    assert all(p.grad is None and p.requires_grad for p in classifier.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


class Functional(nn.Module):
    """Functions between its modules; one module is called twice, and one returns no tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.pool, self.between = nn.Conv2d(1, 4, 3), nn.AvgPool2d(2), nn.Linear(36, 5)
        self.twice, self.second, self.pair = nn.Linear(5, 5), nn.Linear(5, 3), nn.LSTM(5, 5)

    def forward(self, x):
        x = self.pool(F.relu(self.first(x))).flatten(1)
        x = F.relu(self.twice(F.relu(self.twice(self.between(x)))))
        return self.second(x) + 0 * self.pair(x)[0].sum()


def test_layers_are_those_that_are_called_once_after_their_activation():
    x = images(2)
    normalised = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Identity(), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(18, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3),
    ).eval()  # fmt: skip
    assert activation_layers(normalised, x) == ("2", "3", "8", "10")
    assert hidden_layer(normalised, x) in ("8", "9")
    functional = Functional().eval()
    assert activation_layers(functional, x) == ("first", "pool", "between", "second")
    assert hidden_layer(functional, x) is None
    # Of more than are wanted, those that lie evenly apart.
    assert activation_layers(normalised, x, most=2) == ("2", "10")
    seen = observe(normalised, x, activation_layers(normalised, x))
    assert torch.equal(seen.layers["3"], normalised[:4](x))
    with pytest.raises(SplitError):
        hidden_layer(nn.Sequential(normalised, nn.Softplus()).eval(), x)


FINDING = {"preset": "mnist", "bounds": (0.0, 1.0), "seed": 0, "report": Mock()}


def test_detectors_that_were_fitted_to_other_code_are_not_taken_over(tmp_path):
    """The weights are the same, and only the forward differs."""
    clean, labels = load_dataset("digits").take(range(40))
    network, changed = digits_network(), digits_network()
    changed.forward = lambda x: type(changed).forward(changed, x.round())
    for one, count in ((network, 1), (network, 1), (changed, 2)):
        find_detectors(["fs"], one, clean, labels, attacked=20, folder=tmp_path, **FINDING)
        assert len(list(tmp_path.iterdir())) == count


def test_workers_fit_what_is_fitted_here(tmp_path, monkeypatch):
    """Adversarial examples are made batch by batch, each by whichever worker is free."""
    monkeypatch.setattr("robust_ext.evaluations.mead.fitting._BATCH", 20)
    clean, labels = load_dataset("digits", split="train").take(range(150))
    names, scores = ["lid", "nss"], []
    for folder, executor in ((None, None), (tmp_path, partial(LocalExecutor, 2))):
        with attack_worker(isolate=False, executor=executor):
            found = find_detectors(names, digits_network(), clean, labels, attacked=40, folder=folder, **FINDING)
        assert list(found) == names
        scores.append(torch.stack([one.score(1 - clean[:20]) for one in found.values()]))
    assert torch.allclose(*scores, rtol=1e-5)
    assert len(list(tmp_path.iterdir())) == 2
