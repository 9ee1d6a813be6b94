"""What all detectors share: scores, thresholds, batches, gradients, randomness, fits, files, settings and refusals."""

import inspect
import json
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sklearn.metrics import roc_auc_score
from torch import nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError, RobustExtError
from robust_ext.core.random import seeded_globals
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors import CombinedDetector, Detector, ScoreDetector, Triggers, make_triggers, observe
from robust_ext.detectors._features.squeezers import Median, NonLocalMeans
from robust_ext.detectors.catalogue import DETECTORS, PUBLISHED
from robust_ext.detectors.trapdoor import train_epoch
from robust_ext.evaluations.detectors import detector_digest
from robust_ext.models.defended import Defended
from tests.detectors import cases
from tests.detectors.cases import ADVERSARIAL, CASES, CLEAN, NAMES, RANDOM, data, fitted, made, network, score, state


@pytest.fixture(scope="module")
def detectors():
    """One fitted detector of each kind, which tests leave as it is."""
    return {name: fitted(name, network()) for name in CASES}


def test_the_table_has_every_published_detector():
    assert {case.kind for case in CASES.values()} == set(PUBLISHED)
    assert {name: CASES[name].kind for name in DETECTORS} == DETECTORS


@NAMES
def test_scores_do_not_depend_on_batches_or_memory(detectors, name):
    detector, x = detectors[name], data(7, 3)
    whole = score(detector, x)
    assert (whole.shape, whole.dtype, detector.training) == ((7,), torch.float32, False)
    for size in (1, 2, 5):
        with seeded_globals(2), torch.no_grad():
            parts = torch.cat([detector.score(part) for part in torch.split(x, size)])
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(score(detector, strided), whole, rtol=1e-4, atol=1e-4)
    assert score(detector, x[:0]).shape == (0,)
    assert torch.equal(detector(x[:1]), score(detector, x[:1])) or name in RANDOM


@NAMES
def test_randomness_is_torchs_and_is_stated(detectors, name):
    detector, x = detectors[name], data(6)
    assert detector.random == (name in RANDOM)
    assert torch.equal(score(detector, x, 3), score(detector, x, 3))
    assert torch.equal(score(detector, x, 3), score(detector, x, 4)) == (name not in RANDOM)
    drawn = torch.get_rng_state()
    with torch.no_grad():
        detector.score(x)
    assert torch.equal(torch.get_rng_state(), drawn) == (name not in RANDOM)


@NAMES
def test_gradients_are_those_of_finite_differences(name):
    detector = fitted(name, network()).double()
    assert detector.differentiable
    x = (data(2, 7) * 0.8 + 0.1).double().requires_grad_()

    def seeded(x):
        with seeded_globals(1):
            return detector.score(x)

    assert seeded(x).dtype == torch.float64
    assert torch.autograd.gradcheck(seeded, (x,), eps=1e-6, atol=1e-4, rtol=1e-3)


@NAMES
def test_fits_follow_their_seed_and_leave_no_trace(name):
    classifier, clean = network(), CLEAN.clone()
    before = {key: value.clone() for key, value in classifier.state_dict().items()}
    torch.manual_seed(99)
    drawn = torch.get_rng_state()
    one, two, other = (state(fitted(name, classifier, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert all(torch.equal(one[key], other[key]) for key in one) != CASES[name].seeded
    assert torch.equal(CLEAN, clean)
    assert all(torch.equal(value, before[key]) for key, value in classifier.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in classifier.parameters())
    assert not any(part.training or part._forward_hooks for part in classifier.modules())
    own = {name: p for name, p in fitted(name, classifier).named_parameters() if not name.startswith("classifier.")}
    assert not any(p.requires_grad for p in own.values())


@NAMES
def test_files_hold_all_of_it(detectors, name, tmp_path):
    detector, x = detectors[name], data(9, 4)
    given = json.loads(json.dumps(CASES[name].settings))
    if name == "fs":
        given["squeezers"] = [[kind, {**own}] for kind, own in detector.settings["squeezers"]]
    assert {key: detector.settings[key] for key in given} == given
    assert json.loads(json.dumps(detector.settings)) == detector.settings
    path = tmp_path / "detector.safetensors"
    detector.threshold = torch.tensor(3.09)
    try:
        detector.save(path)
        again = type(detector).load(path, detector.classifier)
        assert (again.settings, again.random) == (detector.settings, detector.random)
        assert again.classifier is detector.classifier
        assert torch.equal(score(again, x), score(detector, x))
        assert torch.equal(again.threshold, detector.threshold)
        assert detector_digest(again) == detector_digest(detector)
        again.threshold = torch.tensor(3.1)
        assert detector_digest(again) != detector_digest(detector)
    finally:
        detector.threshold = torch.tensor(torch.nan)
    changed = {key: value for key, value in detector.settings.items() if key != "batch_size"}
    if "bounds" in changed:
        other = type(detector)(detector.classifier, **{**changed, "bounds": [-5, 5]})
        assert detector_digest(other) != detector_digest(type(detector)(detector.classifier, **changed))
    with pytest.raises(DataError, match=f"holds {type(detector).__name__}, expected CombinedDetector"):
        CombinedDetector.load(path, detector.classifier)


@NAMES
def test_attackers_get_the_same_score_and_thresholds_their_rate(name):
    detector, x = fitted(name, network()), data(5, 8)
    with seeded_globals(0):
        assert 0 < detector.calibrate(data(100, 3), false_positive_rate=0.1).achieved <= 0.1
    with seeded_globals(1):
        expected = detector.score_margin(x)
    with seeded_globals(1):
        logits, margin = Defended(detector.classifier, detector).both(x)
    torch.testing.assert_close((logits, margin), (detector.classifier(x), expected))
    with seeded_globals(1):
        assert torch.equal(detector.decide(x), expected > 0)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (0.0, 255.0)])
@pytest.mark.parametrize("name", ["nss", "fs", "magnet", "odds"])
def test_bounds_make_no_difference(name, bounds):
    low, width = bounds[0], bounds[1] - bounds[0]
    plain = fitted(name, network(), bounds=(0.0, 1.0))
    scaled = made(name, network(low=low, width=width), bounds=bounds)
    CASES[name].fit(scaled, CLEAN * width + low, ADVERSARIAL * width + low, 0)
    x = data(9, 8)
    # Nearly the same: values in other bounds are rounded otherwise, and so are the fits.
    torch.testing.assert_close(score(scaled, x * width + low), score(plain, x), rtol=5e-3, atol=5e-3)
    if name != "fs":
        with pytest.raises(InvalidArgumentError, match="got values in"):
            CASES[name].fit(scaled, CLEAN * 0 + bounds[1] + 1, ADVERSARIAL, 0)


@pytest.mark.parametrize(("name", "setting", "value", "message"), cases.REFUSED)
def test_settings_are_checked(name, setting, value, message):
    with pytest.raises(InvalidArgumentError, match=message):
        made(name, network(), **{setting: value})


X, NET, ZEROS, ONE_CLASS = data(40), network(), torch.zeros, torch.zeros(9, dtype=torch.int64)
TRIGGERS = make_triggers(3, (1, 6, 5), generator=torch.Generator().manual_seed(0), size=2)
Unit = partial(ScoreDetector, score=lambda x: x.flatten(1).mean(1))


@pytest.mark.parametrize("name", [name for name in CASES if name != "fs"])
def test_a_fit_comes_first_and_takes_inputs(name):
    detector, fit = made(name, network()), CASES[name].fit
    with pytest.raises(ModelError, match=r"detector \w+: is not fitted; call fit\([a-z_, ]+\) first"):
        detector.score(data(2))
    for wrong in (CLEAN.tolist(), CLEAN * torch.nan, CLEAN.int(), CLEAN[:0]):
        with pytest.raises(InvalidArgumentError, match=r"clean|inputs"):
            fit(detector, wrong, ADVERSARIAL, 0)
        if detector.supervised:
            with pytest.raises(InvalidArgumentError, match="adversarial"):
                fit(detector, CLEAN, wrong, 0)
    given = (CLEAN, ADVERSARIAL) if detector.supervised else (CLEAN, TRIGGERS) if name == "trapdoor" else (CLEAN,)
    wrong = {"batch_size": 0, "seed": -1, "folds": 1, "epochs": 0, "learning_rate": 0, "noise": -1.0}
    for key in wrong.keys() & inspect.signature(detector.fit).parameters.keys():
        with pytest.raises(InvalidArgumentError, match=key):
            detector.fit(*given, **{key: wrong[key]})
    assert not any(bool(value.numel()) for key, value in state(detector).items() if "layer" not in key)


def draw_triggers(**wrong):
    return make_triggers(**{"classes": 3, "shape": (1, 6, 5), "generator": torch.Generator(), **wrong})


def train_trapdoors(**wrong):
    right = {"inputs": X[:9], "labels": ONE_CLASS, "triggers": TRIGGERS, "generator": torch.Generator()}
    train_epoch(NET, torch.optim.SGD(NET.parameters(), lr=0.1), **{**right, **wrong})


WRONG_DATA = [
    ("dla", "clean: got 0 inputs", lambda one: one.fit(X[:0], X)),
    ("nss", "clean: got 0 inputs", lambda one: one.fit(X[:0], X)),
    ("nss", "adversarial: got 4 inputs, expected at least 5", lambda one: one.fit(X, X[:4])),
    ("nss", "one or three channels", lambda one: one.fit(ZEROS(9, 2, 8, 8), X)),
    ("ml-loo", "adversarial: got 3 inputs, expected at least folds = 5", lambda one: one.fit(X, X[:3])),
    ("lid", "one for each clean input", lambda one: one.fit(X, X[:30])),
    ("lid", "at least 23, of which 20 become references", lambda one: one.fit(X[:22], X[:22], folds=3)),
    ("lid", "at least size = 20", lambda one: one.fit(X, X, references=X[:19])),
    ("lid", "layers: got nowhere, expected names of layers", lambda _: fitted("lid", NET, layers=["nowhere"])),
    ("trapdoor", "layers: got nowhere, expected names", lambda _: fitted("trapdoor", NET, layer="nowhere")),
    ("kd-bu", "one for each clean input", lambda one: one.fit(X, X[:30])),
    ("kd-bu", "labels", lambda one: one.fit(X, X, labels=ONE_CLASS[:3])),
    ("kd-bu", "references", lambda one: one.fit(X, X, references=X[:0], noise=0.1)),
    ("kd-bu", "none of class 1, 2", lambda one: one.fit(X, X, labels=ZEROS(40, dtype=torch.int64))),
    ("magnet", "inputs", lambda one: one.fit(X.flatten(1))),
    ("odds", "labels: got shape", lambda one: one.fit(X, ONE_CLASS)),
    ("odds", "fewer than 3 clean inputs", lambda one: one.fit(X[NET(X).argmax(1) == 0])),
    ("trapdoor", "triggers: got", lambda one: one.fit(X, draw_triggers(classes=2))),
    ("trapdoor", "targets: got", lambda _: TRIGGERS.inject(X[:9], targets=ONE_CLASS + 3)),
    ("trapdoor", "masks: got", lambda _: Triggers(ZEROS(2, 3) + 2, ZEROS(2, 3))),
    *(
        ("trapdoor", f"{name}: got", partial(lambda _, call, wrong: call(**wrong), call=call, wrong={name: value}))
        for call, values in (
            (draw_triggers, {"classes": 0, "shape": (4, 4), "clusters": 0, "size": 6, "mask_ratio": 0}),
            (train_trapdoors, {"injection_ratio": 2, "batch_size": 0, "labels": ONE_CLASS + 3}),
        )
        for name, value in values.items()
    ),
    ("fs", "inputs: got shape", lambda _: Median()(ZEROS(2, 9))),
    ("fs", "H and W above 7", lambda _: NonLocalMeans()(ZEROS(2, 1, 7, 9))),
    *(
        ("combined", "^detectors", lambda _, wrong=wrong: CombinedDetector(NET, wrong, method="mean"))
        for wrong in ([], None, [Unit(NET), Unit(network())], [Unit(NET), torch.relu])
    ),
    ("combined", "inputs: got no clean inputs", lambda _: CombinedDetector(NET, [Unit(NET)]).fit_clean(X[:0])),
    ("combined", "method: got 'sum'", lambda _: CombinedDetector(NET, [Unit(NET)], method="sum")),
]


@pytest.mark.parametrize("place", range(len(WRONG_DATA)))
def test_data_that_cannot_be_fitted_is_named(place):
    name, named, call = WRONG_DATA[place]
    with pytest.raises(RobustExtError, match=named):
        call(made(name, NET) if name in CASES else None)


@pytest.mark.parametrize("name", ["kd-bu", "odds", "trapdoor"])
def test_another_classifier_is_refused(detectors, name):
    other = made(name, network(classes=4))
    for key, value in state(detectors[name]).items():
        part, _, last = key.rpartition(".")
        setattr(other.get_submodule(part), last, value)
    with pytest.raises(ModelError, match=r"was fitted to .*, got .*; fit it to this classifier"):
        other.score(data(2))


@NAMES
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_it_runs_where_the_classifier_is(detectors, name):
    x = data(5, 4)
    there = fitted(name, network().cuda())
    assert score(there, x.cuda()).device.type == "cuda"
    if name not in RANDOM:
        torch.testing.assert_close(score(there, x.cuda()).cpu(), score(detectors[name], x), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(score(there.cpu(), x), score(detectors[name], x), rtol=1e-2, atol=1e-2)


NOISE = [("uniform", 0.008), ("sign", 0.01), ("normal", 0.02)]
LONG = {"epochs": 30, "batch_size": 32, "learning_rate": 0.01}
DIGITS = {
    # Settings, training images, epsilon, the least area under the ROC curve, and how it is trained.
    "nss": ({}, 400, 0.15, 0.9, {}),
    "fs": ({"squeezers": [("bit_depth", {"bits": 2})]}, 1, 0.15, 0.85, {}),
    "kd-bu": ({"bandwidth": 1.2, "passes": 10}, 600, 0.3, 0.7, {}),
    "lid": ({"layers": ["1", "3", "6", "8"], "neighbours": 10}, 600, 0.3, 0.8, {}),
    "magnet": ({"temperatures": (10,), "reformer": 1}, 500, 0.3, 0.95, LONG),
    "odds": ({"draws": 16, "noises": NOISE}, 700, 0.15, 0.8, {}),
    "dla": ({"layers": ["6"]}, 800, 0.15, 0.8, {"epochs": 40}),
    "ml-loo": ({"layers": ["1", "3", "6"]}, 150, 0.2, 0.9, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIGITS)
def test_adversarial_digits_score_higher_and_clean_ones_pass(name):
    plain, (given, count, epsilon, least, training) = digits_network(), DIGITS[name]
    classifier = nn.Sequential(*plain[:7], nn.Dropout(0.3), plain[7]).eval()
    train, labels = load_dataset("digits", split="train").take(range(count))
    x, truth = load_dataset("digits", split="test").take(range(300))
    detector = CASES[name].kind(classifier, **given)
    CASES[name].fit(detector, train, cases.attacked(classifier, train, labels, epsilon), 0, **training)
    bad = cases.attacked(classifier, x[:150], truth[:150], epsilon)
    bad = bad[classifier(bad).argmax(1) != truth[:150]]
    assert len(bad) > 80
    scores = torch.cat([score(detector, x[:150]), score(detector, bad)])
    assert roc_auc_score(np.repeat([0, 1], [150, len(bad)]), scores) > least
    with seeded_globals(0):
        assert 0.09 < detector.calibrate(x[:150], false_positive_rate=0.1).achieved <= 0.1
        assert float(detector.decide(x[150:]).float().mean()) < 0.25


@NAMES
def test_logits_that_are_not_finite_raise_nothing_and_let_nothing_pass(name):
    """A score is NaN, and the input rejected, or it is a number that other parts of the network decide."""
    detector, x = fitted(name, network()), data(6, 3)
    detector.threshold = torch.tensor(0.0)
    broken = (torch.arange(99) % 2 == 0)[:, None]
    detector.classifier[-1].register_forward_hook(lambda _, __, out: out.masked_fill(broken[: len(out)], torch.nan))
    scores = score(detector, x)
    with seeded_globals(2):
        assert detector.decide(x)[scores.isnan()].all()


class Mean(Detector):
    """The mean of the hidden units, above a level that is fitted."""

    layers = ("1",)

    def __init__(self, classifier, *, factor=1.0):
        super().__init__(classifier)
        self.factor = factor
        self.register_buffer("level", torch.zeros(()))

    @property
    def settings(self):
        return {"factor": self.factor}

    def score_of(self, observed):
        return (observed.layers["1"] - self.level).mean(1) * self.factor


vectors = partial(data, shape=(2, 3))


def test_scores_are_made_of_one_pass():
    classifier, x, calls = cases.flat(), vectors(7).requires_grad_(), []
    classifier.register_forward_hook(lambda *_: calls.append(1))
    scores = Mean(classifier).score(x)
    assert len(calls) == 1
    torch.testing.assert_close(scores, classifier[1](x.flatten(1)).mean(1))
    (gradient,) = torch.autograd.grad(scores.sum(), x)
    torch.testing.assert_close(gradient, (classifier[1].weight.sum(0) / 5).view(1, 2, 3).expand(7, 2, 3))


@settings(max_examples=60)
@given(st.integers(20, 300), st.sampled_from([0.05, 0.1, 0.25, 0.5]), st.booleans(), st.integers(0, 99))
def test_the_threshold_is_the_lowest_that_keeps_the_rate(count, rate, ties, seed):
    x = vectors(count, seed).round() if ties else vectors(count, seed)
    detector = Mean(cases.flat())
    found = detector.calibrate(x, false_positive_rate=rate, batch_size=1000)
    scores = detector.score(x).detach()
    assert float((scores > detector.threshold).float().mean()) == pytest.approx(found.achieved)
    assert found.achieved <= rate
    assert torch.equal(detector.decide(x), scores > detector.threshold)
    # Brute force: no lower score would do.
    lower = [float(s) for s in scores.unique() if s < detector.threshold]
    assert all(float((scores > s).float().mean()) > rate for s in lower[-3:])
    assert ties or found.achieved == pytest.approx(math.floor(rate * count + 1e-9) / count)
    assert found.interval[0] <= found.achieved <= found.interval[1]
    assert found.samples == count


def test_classes_may_have_thresholds_of_their_own():
    x = vectors(600)
    detector = Mean(cases.flat(among=x))
    found = detector.calibrate(x, false_positive_rate=0.1, per_class=True, batch_size=1000)
    assert (detector.threshold.shape, found.per_class) == ((3,), True)
    predicted, flagged = detector.classifier(x).argmax(1), detector.decide(x)
    for label in range(3):
        mine = flagged[predicted == label]
        assert float(mine.float().mean()) == pytest.approx(math.floor(0.1 * len(mine) + 1e-9) / len(mine))
    torch.testing.assert_close(detector.score_margin(x), detector.score(x) - detector.threshold[predicted])


class Constant(Mean):
    """What a function returns."""

    def __init__(self, function):
        super().__init__(cases.flat())
        self.score_of = function


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Identity()

    def forward(self, x):
        return self.part(self.part(x.flatten(1)))


def calibrate(function, count=40):
    Constant(function or (lambda seen: seen.logits[:, 0])).calibrate(vectors(count))


REFUSED = [
    (r"0\.05 with 19 clean inputs, expected at least 20 clean inputs", lambda: calibrate(None, 19)),
    ("inputs: got no clean inputs", lambda: calibrate(None, 0)),
    ("of class", lambda: Mean(cases.flat()).calibrate(vectors(30), per_class=True)),
    ("has no threshold; call calibrate", lambda: Mean(cases.flat()).decide(vectors(2))),
    (r"returned shape \(40, 3\) for 40 inputs, expected one float", lambda: calibrate(lambda seen: seen.logits)),
    (r"returned shape \(40,\)", lambda: calibrate(lambda seen: seen.predicted)),
    ("returned float", lambda: calibrate(lambda seen: 3.0)),
    ("scored all 40 clean inputs 2, so that it detects", lambda: calibrate(lambda seen: torch.full((40,), 2.0))),
    ("scored NaN on", lambda: calibrate(lambda seen: seen.logits[:, 0].log())),
    ("layers: got 9, expected names of layers", lambda: observe(cases.flat(), vectors(2), ["9"])),
    ("'part' was called 2 times", lambda: observe(Twice(), vectors(2), ["part"])),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_what_cannot_be_scored_or_decided_is_named(message, call):
    with pytest.raises(RobustExtError, match=message):
        call()


def test_scores_that_are_no_numbers_are_detected():
    broken = Constant(lambda seen: seen.inputs.flatten(1).sum(1).sub(1e9).log())
    broken.threshold = torch.tensor(0.0)
    assert broken.score(vectors(2)).isnan().all()
    assert broken.decide(vectors(2)).all()


def test_files_of_something_else_and_damaged_ones_are_refused(tmp_path):
    """Whichever bit it is that differs."""
    detector, draw = Mean(cases.flat()), random.Random(0)
    detector.calibrate(vectors(40))
    (tmp_path / "junk").write_bytes(b"junk")
    save_file({"threshold": torch.zeros(())}, tmp_path / "bare")
    save_file({"threshold": torch.zeros(())}, tmp_path / "part", metadata={"detector": "Mean"})
    detector.save(tmp_path / "whole")
    assert Mean.load(tmp_path / "whole", detector.classifier).threshold == detector.threshold
    wrong = {"junk": "no file written by", "none": "no file written by", "bare": "no detector"}
    wrong["part"] = r"holds \['threshold'\], expected \['level', 'threshold'\]"
    for place in range(60):
        content = bytearray((tmp_path / "whole").read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (tmp_path / str(place)).write_bytes(content)
        wrong[str(place)] = f"/{place}: "
    for name, message in wrong.items():
        with pytest.raises(DataError, match=message):
            Mean.load(tmp_path / name, detector.classifier)
