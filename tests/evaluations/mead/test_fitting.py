"""Detectors by name: what they are trained on, by which constants, whether they detect; and layers that are found."""

from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError, RobustExtWarning, SplitError
from robust_ext.core.objects import resolve_object
from robust_ext.core.random import seeded_globals
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

QUICK = {"kd-bu": {"passes": 8}, "lid": {"neighbours": 10}, "magnet": {"epochs": 20, "batch_size": 16}}


def with_dropout():
    plain = digits_network()
    return nn.Sequential(*plain[:7], nn.Dropout(0.3), plain[7]).eval()


def small(channels=1, classes=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(
            nn.Conv2d(channels, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 6), nn.Tanh(), nn.Linear(6, classes)
        )
    return made.eval()


def images(count, channels=1, seed=0):
    return torch.rand(count, channels, 8, 8, generator=torch.Generator().manual_seed(seed))


def problem(count, channels=1):
    """Images, labels of three classes, and images in place of adversarial ones."""
    clean = images(count, channels)
    return clean, torch.arange(count) % 3, (clean + 0.1).clamp(0, 1)


class InBounds(nn.Module):
    """The network for inputs in these bounds instead of [0, 1]."""

    def __init__(self, network, bounds):
        super().__init__()
        self.network, (self.low, self.high) = network, bounds

    def forward(self, x):
        return self.network((x - self.low) / (self.high - self.low))


def state(detector):
    return {key: value for key, value in detector.state_dict().items() if not key.startswith("classifier.")}


def same(one, other):
    a, b = state(one), state(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) or bool(a[key].isnan().all()) for key in a)


@pytest.fixture(scope="module")
def digits():
    clean, labels = load_dataset("digits", split="train").take(range(400))
    return clean, labels, training_adversarials(digits_network(), clean[:150], labels[:150])


@pytest.fixture(scope="module")
def attacked():
    held, labels = load_dataset("digits", split="test").take(range(100))
    return held, training_adversarials(digits_network(), held, labels, epsilon=0.125, seed=5)


@pytest.fixture(scope="module")
def fitted(digits):
    clean, labels, adversarial = digits
    classifier = with_dropout()
    return {
        name: fit_detector(name, classifier, clean, labels, adversarial=adversarial, **QUICK.get(name, {}))
        for name in NAMED
    }


@pytest.mark.parametrize(
    ("name", "least"), [("nss", 0.9), ("kd-bu", 0.7), ("lid", 0.65), ("fs", 0.55), ("magnet", 0.8)]
)
def test_adversarial_digits_score_higher(fitted, attacked, name, least):
    detector, (held, adversarial) = fitted[name], attacked
    assert type(detector) is DETECTORS[name]
    with torch.no_grad(), seeded_globals(0):
        scores = torch.cat([detector.score(held), detector.score(adversarial)])
    assert roc_auc_score([0] * len(held) + [1] * len(held), scores) > least


@pytest.mark.parametrize("name", NAMED)
def test_it_is_calibrated_by_its_user_and_comes_back_from_a_file(fitted, attacked, tmp_path, name):
    detector, held = fitted[name], attacked[0]
    assert bool(detector.threshold.isnan())
    path = tmp_path / "detector.safetensors"
    try:
        found = detector.calibrate(held, false_positive_rate=0.1)
        detector.save(path)
        again = load_detector(name, path, detector.classifier)
        assert 0 < found.achieved <= 0.1
        assert type(again) is DETECTORS[name]
        assert again.settings == detector.settings
        assert torch.equal(again.threshold, detector.threshold)
        with torch.no_grad():
            with seeded_globals(1):
                before = detector.score(held[:20])
            with seeded_globals(1):
                torch.testing.assert_close(again.score(held[:20]), before)
    finally:
        detector.threshold = torch.tensor(torch.nan)
    other = "fs" if name == "nss" else "nss"
    with pytest.raises(DataError, match=f"expected {DETECTORS[other].__name__}"):
        load_detector(other, path, detector.classifier)


@pytest.mark.parametrize("name", NAMED)
def test_the_seed_decides_and_no_trace_is_left(digits, name):
    clean, labels = digits[0][:120], digits[1][:120]
    classifier = with_dropout()
    quick = {"kd-bu": {"passes": 3}, "lid": {"neighbours": 5, "size": 20}, "magnet": {"epochs": 1}}.get(name, {})
    given = digits[2][:100]
    inputs, drawn = clean.clone(), torch.get_rng_state()
    weights = {key: value.clone() for key, value in classifier.state_dict().items()}
    one, two, three = (
        fit_detector(name, classifier, clean, labels, adversarial=given, rows=60, seed=seed, **quick)
        for seed in (4, 4, 7)
    )
    assert same(one, two)
    assert same(one, three) == (name == "fs")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(clean, inputs)
    assert all(torch.equal(value, weights[key]) for key, value in classifier.state_dict().items())
    assert not any(part.training for part in classifier.modules())
    assert all(p.requires_grad and p.grad is None for p in classifier.parameters())
    assert not any(part._forward_hooks for part in classifier.modules())


def test_fits_are_those_of_the_classes():
    classifier, clean, labels = small(), images(90), torch.arange(90) % 3
    adversarial = (clean + 0.1 * images(90, seed=3).sub(0.5).sign()).clamp(0, 1)
    nss = NSSDetector(classifier)
    nss.fit(clean, adversarial)
    assert same(fit_detector("nss", classifier, clean, labels, adversarial=adversarial), nss)
    # The first 40 rows are trained on, and the others are references.
    lid = LIDDetector(classifier, layers=["1", "4", "5"], neighbours=20, size=30)
    lid.fit(clean[:40], adversarial[:40], references=clean[40:], folds=3, seed=2)
    found = fit_detector("lid", classifier, clean, labels, adversarial=adversarial[:40], size=30, folds=3, seed=2)
    assert found.layers == ("1", "4", "5")
    assert same(found, lid)
    density = KDBUDetector(classifier, layer="4", bandwidth=0.7)
    density.fit(clean[:40], adversarial[:40], references=clean[40:], labels=labels[40:], folds=3, seed=2)
    chosen = {"bandwidth": 0.7, "folds": 3, "seed": 2}
    found = fit_detector("kd-bu", classifier, clean, labels, adversarial=adversarial[:40], **chosen)
    assert found.layers == ("4",)
    assert same(found, density)
    autoencoders = MagNetDetector.preset("mnist", classifier, epochs=2)
    autoencoders.fit(clean, batch_size=16, learning_rate=1e-3, seed=3)
    changed = {"epochs": 2, "batch_size": 16, "learning_rate": 1e-3}
    assert same(fit_detector("magnet", classifier, clean, labels, seed=3, **changed), autoencoders)


def test_too_few_other_rows_are_no_references():
    classifier, (clean, labels, adversarial) = small(), problem(90)
    adversarial = adversarial[:70]
    lid = LIDDetector(classifier, layers=["1", "4", "5"], neighbours=20, size=30)
    lid.fit(clean[:70], adversarial, seed=1)
    assert same(fit_detector("lid", classifier, clean, labels, adversarial=adversarial, seed=1, size=30), lid)
    density = KDBUDetector(classifier, layer="4")
    density.fit(clean[:70], adversarial, labels=labels[:70], seed=1)
    assert same(fit_detector("kd-bu", classifier, clean, labels, adversarial=adversarial, seed=1), density)


def test_adversarial_inputs_are_made_where_none_are_given_of_as_many_rows():
    classifier, clean, labels = small(), images(30), torch.arange(30) % 3
    made = training_adversarials(classifier, clean, labels, seed=6)
    given = fit_detector("nss", classifier, clean, labels, adversarial=made, seed=6)
    assert same(fit_detector("nss", classifier, clean, labels, seed=6), given)
    seen = []
    handle = classifier.register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    fit_detector("nss", classifier, clean, labels, rows=12)
    handle.remove()
    assert set(seen) == {2, 12}


@pytest.mark.parametrize(
    ("channels", "preset", "expected"),
    [(1, "auto", "mnist"), (3, "auto", "cifar10"), (1, "cifar10", "cifar10"), (2, "mnist", "mnist")],
)
def test_presets_are_the_papers(channels, preset, expected):
    if expected == "cifar10":
        pytest.importorskip("cv2")
    classifier, (clean, labels, adversarial), mnist = small(channels), problem(60, channels), expected == "mnist"

    def fit(name, **settings):
        return fit_detector(name, classifier, clean, labels, preset=preset, adversarial=adversarial, **settings)

    density = fit("kd-bu")
    assert (density.bandwidth, density.passes) == (1.2 if mnist else 0.26, 50)
    assert fit("kd-bu", bandwidth=3).bandwidth == 3
    assert fit("lid", size=40).neighbours == (20 if mnist else 30)
    squeezers = [squeezer.kind for squeezer in fit("fs").squeezers]
    assert squeezers == ["bit_depth", "median"] + ["opencv_non_local_means"] * (not mnist)
    assert fit("fs").squeezers[0].bits == (1 if mnist else 5)
    magnet = fit("magnet", epochs=1)
    assert magnet.structures == (((3, "average", 3), (3,)) if mnist else ((3,),))
    assert (magnet.powers, magnet.temperatures) == (((2, 1), ()) if mnist else ((1,), (10, 40)))
    assert magnet.noise == (0.1 if mnist else 0.025)
    if channels == 1:
        machine = fit("nss")
        assert (machine.penalty, machine.gamma) == (10, 0.01)


def test_magnet_sees_as_many_images_as_there_is_time_for(monkeypatch):
    seen = []
    monkeypatch.setattr(
        MagNetDetector, "fit", lambda self, inputs, *, batch_size, learning_rate, seed: seen.append(locals())
    )
    monkeypatch.setattr("robust_ext.detectors.magnet.IMAGES", 1000)
    epochs = []
    for count in (5, 10, 11, 300, 2000):
        fit_detector("magnet", small(), images(count), torch.zeros(count, dtype=torch.int64), seed=8)
        epochs.append(seen[-1]["self"].epochs)
    assert epochs == [100, 100, 91, 4, 1]
    assert {(found["batch_size"], found["learning_rate"], found["seed"]) for found in seen} == {(32, 0.01, 8)}


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (0.0, 255.0)])
@pytest.mark.parametrize("name", ["nss", "lid", "fs"])
def test_bounds_make_no_difference(name, bounds):
    clean, labels, adversarial = problem(60)
    low, width = bounds[0], bounds[1] - bounds[0]
    settings = {"size": 30, "neighbours": 8} if name == "lid" else {}
    plain = fit_detector(name, small(), clean, labels, adversarial=adversarial, **settings)
    settings |= {"adversarial": (adversarial * width + low).clamp(*bounds), "bounds": bounds}
    moved = fit_detector(name, InBounds(small(), bounds).eval(), clean * width + low, labels, **settings)
    x = images(25, seed=9)
    # Nearly the same: values in other bounds are rounded otherwise, and so are the fits.
    torch.testing.assert_close(moved.score(x * width + low), plain.score(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)])
def test_training_adversarials_rise_within_the_ball(bounds):
    low, width = bounds[0], bounds[1] - bounds[0]
    classifier, clean = digits_network(), load_dataset("digits").take(range(40))[0]
    labels = classifier(clean).argmax(1)
    model = InBounds(classifier, bounds).eval()
    clean = clean * width + low
    found = training_adversarials(model, clean, labels, epsilon=0.1, bounds=bounds, batch_size=16)
    assert (found.shape, found.dtype) == (clean.shape, torch.float32)
    assert bounds[0] <= float(found.min()) <= float(found.max()) <= bounds[1]
    distance = (found - clean).abs().flatten(1).amax(1)
    # Ascent in linf ends in a corner of the ball.
    torch.testing.assert_close(distance, torch.full((40,), 0.1 * width), rtol=1e-4, atol=0)
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), labels, reduction="none") for x in (clean, found)]
    assert bool((losses[1] > losses[0]).all())


def test_training_adversarials_do_not_depend_on_batches_and_leave_no_trace():
    classifier, clean, labels = small(), images(7), torch.arange(7) % 3
    classifier[0].weight.requires_grad_(False)
    before = {key: value.clone() for key, value in classifier.state_dict().items()}
    drawn = torch.get_rng_state()
    whole = training_adversarials(classifier, clean, labels, seed=2)
    parts = training_adversarials(classifier, clean, labels, seed=2, batch_size=3)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    rest = training_adversarials(classifier, clean[3:], labels[3:], seed=2, start=3)
    torch.testing.assert_close(rest, whole[3:], rtol=0, atol=1e-6)
    assert not torch.equal(training_adversarials(classifier, clean, labels, seed=3), whole)
    one = training_adversarials(classifier, clean[:1], labels[:1], seed=2)
    torch.testing.assert_close(one, whole[:1], rtol=0, atol=1e-6)
    assert training_adversarials(classifier, clean[:0], labels[:0]).shape == (0, 1, 8, 8)
    assert all(torch.equal(value, before[key]) for key, value in classifier.state_dict().items())
    assert [p.requires_grad for p in classifier.parameters()] == [False] + [True] * 5
    assert all(p.grad is None for p in classifier.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not classifier.training


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("mahalanobis", {}, "name: got 'mahalanobis', expected one of 'nss', 'kd-bu', 'lid', 'fs', 'magnet'"),
        ("nss", {"preset": "svhn"}, "preset: got 'svhn', expected one of 'auto', 'mnist', 'cifar10'"),
        ("nss", {"bandwidth": 1.2}, "settings: got bandwidth, expected settings of nss: output, penalty, gamma, batch"),
        ("fs", {"size": 2, "epochs": 3}, "settings: got epochs, size, expected settings of fs: squeezers, straight_t"),
        ("magnet", {"channels": 1}, "settings: got channels, expected settings of magnet: structures, powers"),
        ("lid", {"references": None}, "settings: got references, expected settings of lid: layers, neighbours, size"),
        ("lid", {"layers": ["99"]}, "layers: got 99, expected names of layers"),
        ("lid", {}, "clean: got 6 inputs to train on, of which 100 become references, expected at least 5 besi.* size"),
        ("lid", {"rows": 4, "size": 2, "neighbours": 2}, "size: got 2, expected an integer of at least 3"),
        ("kd-bu", {}, "clean: got 6 inputs to train on, of which 3 become references, expected at least 5 beside"),
        ("kd-bu", {"layer": "hidden"}, "layers: got hidden, expected names of layers"),
        ("nss", {"rows": 1}, "rows: got 1, expected an integer of at least 2"),
        ("nss", {"seed": -1}, "seed: got -1"),
        ("nss", {"bounds": (1, 0)}, "bounds: got"),
        ("nss", {"clean": images(6) * 2}, "clean: got values in"),
        ("nss", {"clean": images(0), "labels": torch.zeros(0, dtype=torch.int64)}, "at least one"),
        ("nss", {"labels": torch.zeros(5, dtype=torch.int64)}, "labels: got shape"),
        ("nss", {"labels": torch.full((6,), 3)}, "labels: got labels in 3..3"),
        ("nss", {"adversarial": images(7)}, "adversarial: got shape .* one for each clean input, or for each of the"),
        ("nss", {"adversarial": images(6, 2)}, "adversarial: got shape"),
        ("nss", {"adversarial": images(0)}, "adversarial: got shape"),
    ],
)
def test_what_is_refused_is_refused_before_the_attack(monkeypatch, name, changed, message):
    given = {"clean": images(6), "labels": torch.arange(6) % 3, **changed}
    monkeypatch.setattr("robust_ext.evaluations.mead.fitting.run_attack", lambda *_, **__: pytest.fail("attacked"))
    with pytest.raises(InvalidArgumentError, match=message):
        fit_detector(name, small(), **given)


@pytest.mark.parametrize("name", ["kd-bu", "lid", "fs", "magnet"])
def test_constants_are_to_be_chosen_for_inputs_of_other_channels(name):
    with pytest.raises(InvalidArgumentError, match=r"preset: got 'auto' with clean inputs of shape .*'mnist' or 'cifa"):
        fit_detector(name, small(2), images(6, 2), torch.arange(6) % 3)
    found = fit_detector("fs", small(2), images(6, 2), torch.arange(6) % 3, squeezers=[("bit_depth", {"bits": 3})])
    assert found.settings["squeezers"][0][0] == "bit_depth"


def test_networks_that_do_not_fit_are_told():
    clean, labels, adversarial = problem(40)
    given = {"adversarial": adversarial}
    ending = nn.Sequential(*small(), nn.Tanh()).eval()
    with pytest.raises(InvalidArgumentError, match="layer: got None, expected the name of the layer before the logits"):
        fit_detector("kd-bu", ending, clean, labels, **given)
    assert fit_detector("kd-bu", ending, clean, labels, layer="4", **given).layers == ("4",)
    with pytest.raises(ModelError, match="train mode"):
        fit_detector("lid", with_dropout().train(), clean, labels, **given)
    with pytest.raises(DataError, match="references: none of class 9"):
        fit_detector("kd-bu", with_dropout(), clean, torch.arange(40) % 9, **given)
    with pytest.raises(InvalidArgumentError, match="name: got 'odds'"):
        load_detector("odds", "nowhere", ending)
    with pytest.warns(RobustExtWarning, match="has no dropout modules"):
        fit_detector("kd-bu", small(), clean, labels, **given)


class Functional(nn.Module):
    """Functions between its modules; one module is called twice, and one returns no tensor."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(5, 3)
        self.first = nn.Conv2d(1, 4, 3)
        self.pool = nn.AvgPool2d(2)
        self.twice = nn.Linear(5, 5)
        self.between = nn.Linear(36, 5)
        self.pair = nn.LSTM(5, 5)

    def forward(self, x):
        x = self.pool(F.relu(self.first(x))).flatten(1)
        x = F.relu(self.twice(F.relu(self.twice(self.between(x)))))
        return self.second(x) + 0 * self.pair(x)[0].sum()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2))
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.relu(x)
        return self.relu(self.body(x) + x)


def test_layers_are_those_that_are_called_once_after_their_activation():
    x = images(2)
    normalised = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Identity(), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(18, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3),
    ).eval()  # fmt: skip
    assert activation_layers(normalised, x) == ("2", "3", "8", "10")
    assert hidden_layer(normalised, x) in ("8", "9")
    assert activation_layers(digits_network(), x) == ("1", "3", "6", "7")
    assert hidden_layer(digits_network(), x) == "6"
    functional = Functional().eval()
    assert activation_layers(functional, x) == ("first", "pool", "between", "second")
    assert hidden_layer(functional, x) is None
    residual = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), Residual()), nn.Flatten(), nn.Linear(72, 3)).eval()
    assert activation_layers(residual, x) == ("0.0", "0.1.body.1", "0.1", "2")
    seen = observe(residual, x, activation_layers(residual, x))
    assert torch.equal(seen.layers["0.1"], residual[0](x))
    with pytest.raises(ModelError, match="no module is called exactly once"):
        activation_layers(nn.Sequential(nn.Flatten()).eval(), x)


def test_layers_of_a_published_residual_network():
    network = resolve_object(f"{Path(__file__).parents[3] / 'examples' / 'networks.py'}:resnet20")()
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    blocks = [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)]
    expected = [name for block in blocks for name in (f"{block}.bn1", f"{block}.bn2", block)]
    found = activation_layers(network, x)
    assert found == ("bn1", *expected, "linear")
    assert set(observe(network, x, found).layers) == set(found)
    assert activation_layers(network, x, most=28) == ("bn1", *blocks, "linear")
    assert activation_layers(network, x, most=3) == ("bn1", "layer2.1", "linear")
    assert activation_layers(network, x, most=1) == ("bn1",)
    assert hidden_layer(network, x) is None
    with pytest.raises(SplitError):
        hidden_layer(nn.Sequential(network, nn.Softplus()).eval(), x)


def test_the_readout_need_not_be_the_last_module():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(5, 3)
            self.act = nn.ReLU()
            self.first = nn.Linear(64, 5)

        def forward(self, x):
            return self.last(self.act(self.first(x.flatten(1))))

    clean, labels, adversarial = problem(40)
    assert fit_detector("kd-bu", Reversed().eval(), clean, labels, adversarial=adversarial).layers == ("act",)


def test_detectors_that_were_fitted_to_other_code_are_not_taken_over(tmp_path):
    """The weights are the same, and only the forward differs."""
    clean, labels = load_dataset("digits").take(range(40))
    network, changed = digits_network(), digits_network()
    changed.forward = lambda x: type(changed).forward(changed, x.round())
    options = {"attacked": 20, "preset": "mnist", "bounds": (0.0, 1.0), "seed": 0, "folder": tmp_path}
    for one, count in ((network, 1), (network, 1), (changed, 2)):
        find_detectors(["fs"], one, clean, labels, report=Mock(), **options)
        assert len(list(tmp_path.iterdir())) == count


def test_workers_fit_what_is_fitted_here(tmp_path, monkeypatch):
    """Adversarial examples are made batch by batch, each by whichever worker is free."""
    monkeypatch.setattr("robust_ext.evaluations.mead.fitting._BATCH", 40)
    clean, labels = load_dataset("digits", split="train").take(range(300))
    names, x = ["lid", "fs", "nss"], 1 - clean[:20]
    options = {"attacked": 100, "preset": "mnist", "bounds": (0.0, 1.0), "seed": 0, "report": Mock()}
    scores = []
    for folder, executor in ((None, None), (tmp_path, partial(LocalExecutor, 2))):
        with attack_worker(isolate=False, executor=executor):
            found = find_detectors(names, digits_network(), clean, labels, folder=folder, **options)
        assert list(found) == names
        scores.append(torch.stack([one.score(x) for one in found.values()]))
    assert torch.allclose(*scores, rtol=1e-5)
    assert len(list(tmp_path.iterdir())) == 3
    assert "making 100 adversarial examples to train detectors on" in [
        call.args[0] for call in options["report"].mock_calls
    ]


def test_errors_of_a_fit_on_a_worker_are_those_of_one_here():
    clean, labels = load_dataset("digits", split="train").take(range(300))
    options = {"attacked": 4, "preset": "auto", "bounds": (0.0, 1.0), "seed": 0, "folder": None, "report": Mock()}
    messages = []
    for executor in (None, partial(LocalExecutor, 2)):
        with (
            attack_worker(isolate=False, executor=executor),
            pytest.raises(InvalidArgumentError, match="folds") as met,
        ):
            find_detectors(["lid", "kd-bu"], digits_network(), clean, labels, **options)
        messages.append(str(met.value))
    assert messages[0] == messages[1]
