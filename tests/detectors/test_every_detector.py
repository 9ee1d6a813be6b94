"""What all detectors share: scores, thresholds, batches, gradients, randomness, fits, files, settings and refusals."""

import inspect
import json
import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError, RobustExtError
from robust_ext.core.random import seeded_globals
from robust_ext.detectors import CombinedDetector, Detector, ScoreDetector, Triggers, make_triggers, observe
from robust_ext.detectors._features.squeezers import Median, NonLocalMeans
from robust_ext.detectors.catalogue import DETECTORS, PUBLISHED
from robust_ext.detectors.trapdoor import train_epoch
from robust_ext.evaluations.detectors import detector_digest
from tests.detectors import cases
from tests.detectors.cases import ADVERSARIAL, CASES, CLEAN, NAMES, RANDOM, data, fitted, made, network, score, state
from tests.models.cases import Net


@pytest.fixture(scope="module")
def detectors():
    """One fitted detector of each kind, which tests leave as it is."""
    return {name: fitted(name, network()) for name in CASES}


def test_the_table_has_every_published_detector():
    assert {case.kind for case in CASES.values()} == set(PUBLISHED)
    assert {name: CASES[name].kind for name in DETECTORS} == DETECTORS


@NAMES
def test_scores_do_not_depend_on_batches_or_memory_and_draws_are_torchs(detectors, name):
    detector, x = detectors[name], data(7, 3)
    whole, same = score(detector, x), name not in RANDOM
    assert (whole.shape, whole.dtype, detector.training) == ((7,), torch.float32, False)
    for size in (1, 2, 5):
        with seeded_globals(2), torch.no_grad():
            parts = torch.cat([detector.score(part) for part in torch.split(x, size)])
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(score(detector, strided), whole, rtol=1e-4, atol=1e-4)
    assert score(detector, x[:0]).shape == (0,)
    assert torch.equal(score(detector, x), whole)
    drawn = torch.get_rng_state()
    detector(x)
    states = (torch.equal(score(detector, x, 4), whole), torch.equal(torch.get_rng_state(), drawn), not detector.random)
    assert states == (same, same, same)


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
    detector = fitted(name, classifier)
    one, two, other = state(detector), *(state(fitted(name, classifier, seed=seed)) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert all(torch.equal(one[key], other[key]) for key in one) != CASES[name].seeded
    assert torch.equal(CLEAN, clean)
    assert all(torch.equal(value, before[key]) for key, value in classifier.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in classifier.parameters())
    assert not any(part.training or part._forward_hooks for part in classifier.modules())
    assert not any(p.requires_grad for key, p in detector.named_parameters() if not key.startswith("classifier."))


@NAMES
def test_files_hold_all_of_it(detectors, name, tmp_path):
    detector, x = detectors[name], data(9, 4)
    given, kept = (json.loads(json.dumps(one)) for one in (CASES[name].settings, detector.settings))
    assert kept.items() >= {key: value for key, value in given.items() if key != "squeezers"}.items()
    path = tmp_path / "detector.safetensors"
    detector.threshold = torch.tensor(3.09)
    try:
        detector.save(path)
        again = type(detector).load(path, detector.classifier)
        assert (again.settings, again.random) == (detector.settings, detector.random)
        assert torch.equal(score(again, x), score(detector, x))
        assert torch.equal(again.threshold, detector.threshold)
        assert detector_digest(again) == detector_digest(detector)
        again.threshold = torch.tensor(3.1)
        assert detector_digest(again) != detector_digest(detector)
    finally:
        detector.threshold = torch.tensor(torch.nan)
    with pytest.raises(DataError, match=f"holds {type(detector).__name__}, expected CombinedDetector"):
        CombinedDetector.load(path, detector.classifier)


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


# Settings that a detector checks itself: ranges that are declared are checked with those of all settings, in core.
WRONG_SETTINGS = [
    ("kd-bu", "layer", [3]),
    ("lid", "layers", ["1", [1]]),
    ("fs", "squeezers", ["svhn", ["median"], [Median], [("blur", {})], [("bit_depth", {"depth": 1})]]),
    ("magnet", "structures", [[], [[]], [[3, "max"], [3]], [[0], [3]], [3, 3]]),
    ("magnet", "powers", [[1]]),
    ("magnet", "reformer", [2]),
    ("odds", "noises", [[], "normal", [("sign", 0)], [("normal", 0.1, 2)], [("pink", 0.1)]]),
]


def test_settings_are_checked():
    for name, setting, value in (
        (name, setting, value) for name, setting, values in WRONG_SETTINGS for value in values
    ):
        with pytest.raises(InvalidArgumentError, match=f"^{setting}: got "):
            made(name, network(), **{setting: value})
    with pytest.raises(InvalidArgumentError, match="search: got 4, expected an odd integer"):
        NonLocalMeans(search=4)
    with pytest.raises(InvalidArgumentError, match="size: got 20, expected an integer of at least 21"):
        made("lid", network(), neighbours=20)


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


TWICE = Net(lambda net, x: net.part(net.part(x.flatten(1))), part=nn.Identity())
X, NET, ZEROS, ONE_CLASS = data(40), network(), torch.zeros, torch.zeros(9, dtype=torch.int64)
TRIGGERS = make_triggers(3, (1, 6, 5), generator=torch.Generator().manual_seed(0), size=2)
Unit = partial(ScoreDetector, score=lambda x: x.flatten(1).mean(1))


def fit(name, *given, **more):
    return lambda: made(name, NET).fit(*given, **more)


def combined(detectors, method="mean"):
    return lambda: CombinedDetector(NET, detectors, method=method)


def draw_triggers(**wrong):
    return make_triggers(**{"classes": 3, "shape": (1, 6, 5), "generator": torch.Generator(), **wrong})


def train_trapdoors(**wrong):
    right = {"inputs": X[:9], "labels": ONE_CLASS, "triggers": TRIGGERS, "generator": torch.Generator()}
    train_epoch(NET, torch.optim.SGD(NET.parameters(), lr=0.1), **{**right, **wrong})


WRONG_TRIGGERS = {"classes": 0, "shape": (4, 4), "clusters": 0, "size": 6, "mask_ratio": 0}
WRONG_TRAINING = {"injection_ratio": 2, "batch_size": 0, "labels": ONE_CLASS + 3}
REFUSED = [
    (r"0\.05 with 19 clean inputs, expected at least 20 clean", lambda: Mean(cases.flat()).calibrate(vectors(19))),
    ("inputs: got no clean inputs", lambda: Mean(cases.flat()).calibrate(vectors(0))),
    ("of class", lambda: Mean(cases.flat()).calibrate(vectors(30), per_class=True)),
    ("has no threshold; call calibrate", lambda: Mean(cases.flat()).decide(vectors(2))),
    ("layers: got 9, expected names of layers", lambda: observe(cases.flat(), vectors(2), ["9"])),
    ("'part' was called 2 times", lambda: observe(TWICE, vectors(2), ["part"])),
    ("adversarial: got 4 inputs, expected at least 5", fit("nss", X, X[:4])),
    ("one or three channels", fit("nss", ZEROS(9, 2, 8, 8), X)),
    ("one for each clean input", fit("lid", X, X[:30])),
    ("at least 23, of which 20 become references", fit("lid", X[:22], X[:22], folds=3)),
    ("at least size = 20", fit("lid", X, X, references=X[:19])),
    ("labels", fit("kd-bu", X, X, labels=ONE_CLASS[:3])),
    ("references", fit("kd-bu", X, X, references=X[:0], noise=0.1)),
    ("none of class 1, 2", fit("kd-bu", X, X, labels=torch.zeros(40).long())),
    ("inputs", fit("magnet", X.flatten(1))),
    ("fewer than 3 clean inputs", fit("odds", X[NET(X).argmax(1) == 0])),
    ("triggers: got", fit("trapdoor", X, draw_triggers(classes=2))),
    ("targets: got", lambda: TRIGGERS.inject(X[:9], targets=ONE_CLASS + 3)),
    ("masks: got", lambda: Triggers(ZEROS(2, 3) + 2, ZEROS(2, 3))),
    *((f"{name}: got", partial(draw_triggers, **{name: wrong})) for name, wrong in WRONG_TRIGGERS.items()),
    *((f"{name}: got", partial(train_trapdoors, **{name: wrong})) for name, wrong in WRONG_TRAINING.items()),
    ("inputs: got shape", lambda: Median()(ZEROS(2, 9))),
    ("H and W above 7", lambda: NonLocalMeans()(ZEROS(2, 1, 7, 9))),
    *(("^detectors", combined(wrong)) for wrong in ([], None, [Unit(NET), Unit(network())], [Unit(NET), torch.relu])),
    ("method: got 'sum'", combined([Unit(NET)], "sum")),
]


def test_what_cannot_be_fitted_scored_or_decided_is_named():
    for message, call in REFUSED:
        with pytest.raises(RobustExtError, match=message):
            call()


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
