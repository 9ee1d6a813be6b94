"""Scores, thresholds and files of a small detector whose numbers are known."""

import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.detectors import Detector, observe
from tests.detectors import cases
from tests.detectors.cases import flat as network


class Mean(Detector):
    """The mean of the hidden units, above a level that is fitted."""

    layers = ("1",)

    def __init__(self, classifier, *, factor=1.0):
        super().__init__(classifier)
        self.factor = factor
        self.register_buffer("level", torch.zeros(()))
        self.scale = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.scale.weight)

    @property
    def settings(self):
        return {"factor": self.factor}

    def fit(self, inputs):
        self.level = observe(self.classifier, inputs, self.layers).layers["1"].mean(0).detach()

    def score_of(self, observed):
        return self.scale((observed.layers["1"] - self.level).mean(1, keepdim=True)).squeeze(1) * self.factor


class Constant(Detector):
    """What a function returns."""

    def __init__(self, classifier, function):
        super().__init__(classifier)
        self.function = function

    def score_of(self, observed):
        return self.function(observed)


data = partial(cases.data, shape=(2, 3))


def test_scores_are_made_of_one_pass():
    classifier = network()
    calls = []
    classifier.register_forward_hook(lambda *_: calls.append(1))
    x = data(7)
    detector = Mean(classifier)
    scores = detector.score(x)
    assert len(calls) == 1
    torch.testing.assert_close(scores, classifier[1](x.flatten(1)).mean(1))
    assert torch.equal(detector(x), scores)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(detector.score(x).sum(), x)
    expected = (classifier[1].weight.sum(0) / 5).view(1, 2, 3).expand(7, 2, 3)
    torch.testing.assert_close(gradient, expected)
    assert not detector.training


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 300), st.sampled_from([0.05, 0.1, 0.25, 0.5]), st.booleans(), st.integers(0, 99))
def test_the_threshold_is_the_lowest_that_keeps_the_rate(count, rate, ties, seed):
    x = data(count, seed)
    if ties:
        x = x.round()
    detector = Mean(network())
    found = detector.calibrate(x, false_positive_rate=rate, batch_size=1000)
    scores = detector.score(x).detach()
    assert float((scores > detector.threshold).float().mean()) == pytest.approx(found.achieved)
    assert found.achieved <= rate
    assert torch.equal(detector.decide(x), scores > detector.threshold)
    # Brute force: no lower score would do.
    lower = [float(s) for s in scores.unique() if s < detector.threshold]
    assert all(float((scores > s).float().mean()) > rate for s in lower[-3:])
    if not ties:
        assert found.achieved == pytest.approx(math.floor(rate * count + 1e-9) / count)
    assert found.interval[0] <= found.achieved <= found.interval[1]
    assert found.samples == count


def test_classes_may_have_thresholds_of_their_own():
    x, classifier = data(600), network()
    with torch.no_grad():
        classifier[3].bias -= classifier(x).mean(0)
    detector = Mean(classifier)
    found = detector.calibrate(x, false_positive_rate=0.1, per_class=True, batch_size=1000)
    assert detector.threshold.shape == (3,)
    predicted = detector.classifier(x).argmax(1)
    flagged = detector.decide(x)
    for label in range(3):
        mine = flagged[predicted == label]
        assert float(mine.float().mean()) == pytest.approx(math.floor(0.1 * len(mine) + 1e-9) / len(mine))
    assert found.per_class
    torch.testing.assert_close(detector.score_margin(x), detector.score(x) - detector.threshold[predicted])


def test_too_little_data_and_missing_decisions_are_refused():
    detector = Mean(network())
    for count, per_class, message in (
        (19, False, r"0\.05 with 19 clean inputs, expected at least 20 clean inputs"),
        (0, False, "inputs: got no clean inputs"),
        (30, True, "of class"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            detector.calibrate(data(count), per_class=per_class)
    with pytest.raises(ModelError, match="has no threshold; call calibrate"):
        detector.decide(data(2))
    assert bool(detector.threshold.isnan())
    broken = Constant(network(), lambda seen: seen.inputs.flatten(1).sum(1).sub(1e9).log())
    broken.threshold = torch.tensor(0.0)
    assert broken.score(data(2)).isnan().all()
    assert broken.decide(data(2)).all()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda seen: seen.logits, r"returned shape \(40, 3\) for 40 inputs, expected one floating point score"),
        (lambda seen: seen.predicted, r"returned shape \(40,\)"),
        (lambda seen: 3.0, "returned float"),
        (lambda seen: torch.full((40,), 2.0), "Constant: scored all 40 clean inputs 2, so that it detects"),
        (lambda seen: seen.logits[:, 0].log(), "scored NaN on"),
    ],
)
def test_scores_of_another_kind_and_constant_ones_are_refused(function, message):
    with pytest.raises(ModelError, match=message):
        Constant(network(), function).calibrate(data(40))


def test_files_of_something_else_are_refused(tmp_path):
    classifier = network()
    (tmp_path / "junk").write_bytes(b"junk")
    save_file({"threshold": torch.zeros(())}, tmp_path / "bare")
    save_file({"threshold": torch.zeros(())}, tmp_path / "part", metadata={"detector": "Mean"})
    for name, message in (
        *(("junk", "no file written by"), ("none", "no file written by"), ("bare", "no detector")),
        ("part", r"holds \['threshold'\], expected \['level', 'scale.weight', 'threshold'\]"),
    ):
        with pytest.raises(DataError, match=message):
            Mean.load(tmp_path / name, classifier)


def test_a_damaged_file_is_refused_whichever_bit_it_was(tmp_path):
    classifier = network()
    detector = Mean(classifier)
    detector.calibrate(data(40))
    detector.save(tmp_path / "whole")
    whole, draw = (tmp_path / "whole").read_bytes(), random.Random(0)
    assert Mean.load(tmp_path / "whole", classifier).threshold == detector.threshold
    for _ in range(60):
        content = bytearray(whole)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (tmp_path / "damaged").write_bytes(content)
        with pytest.raises(DataError, match="damaged: "):
            Mean.load(tmp_path / "damaged", classifier)


def test_layers_that_cannot_be_observed_are_named():
    with pytest.raises(InvalidArgumentError, match="layers: got 9, expected names of layers"):
        observe(network(), data(2), ["9"])

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Identity()

        def forward(self, x):
            return self.part(self.part(x.flatten(1)))

    with pytest.raises(ModelError, match="'part' was called 2 times"):
        observe(Twice(), data(2), ["part"])
    assert not Twice().part._forward_hooks
