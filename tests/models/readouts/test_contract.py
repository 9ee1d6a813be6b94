"""What readouts are given and return: names and texts, shapes of features, classes of one's own, random models."""

import copy
import pickle

import pytest
import torch
from torch import nn

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.readouts import Readout
from robust_ext.models.readouts.base import check_logits, fitted
from robust_ext.models.readouts.catalogue import READOUTS
from robust_ext.models.readouts.linear import Linear, Logistic
from robust_ext.models.readouts.majority import Drawn, Majority
from robust_ext.registry.readout import as_readout

FILE = """
from robust_ext.models.readouts import Readout
from robust_ext.core.settings import setting, settings_class

@settings_class
class Mean(Readout):
    factor: float = setting(default=1.0, help="Of the score.", above=0)

    def fit(self, features, planted):
        return {"middle": features.double().flatten(2).mean((1, 2))}

    def score(self, features, parameters):
        return self.factor * (features.double().flatten(1).mean(1) - parameters["middle"])

NAME = "logistic"
"""


class Mean(Readout):
    def fit(self, features, planted):
        return {"middle": features.double().flatten(2).mean((1, 2))}

    def score(self, features, parameters):
        return features.double().flatten(1).mean(1) - parameters["middle"]


def test_texts_and_objects(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(FILE)
    assert [type(as_readout(name)) for name in READOUTS] == list(READOUTS.values())
    assert as_readout("nearest(k=3)").k == 3
    assert (as_readout("ensemble", C=2.0).C, as_readout("ensemble(C=3)", C=2.0).C) == (2.0, 3.0)
    assert as_readout(" max-margin() ", C=2.0).description == "MaxMargin()"
    assert as_readout(f"{file}:Mean").factor == 1
    found = as_readout(f"{file}:Mean(factor=2)")
    assert found.description == "Mean(factor=2.0)"
    assert copy.deepcopy(found).description == found.description
    assert as_readout(found) is found
    for wrong, message in (
        ("nearst", r"readout: got 'nearst', expected one of 'logistic', .*did you mean nearest\?"),
        ("nearest(j=3)", r"j: got an unknown setting, expected a setting of a readout: k"),
        ("nearest(k=0)", r"k: got 0, expected an integer of at least 1"),
        ("nearest(3)", r"readout: got nearest\(3\) with the positional argument 3"),
        (f"{file}:NAME", r"readout: got .*, expected the name of a Readout; it names a string"),
        (f"{file}:Man", r"did you mean Mean\?"),
        (f"{file}:setting", r"readout: got an object of the class function, expected one of 'logistic'"),
        (3, r"readout: got an object of the class int, expected one of 'logistic'"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            as_readout(wrong)


class Contrary(Mean):
    def logits(self, features, parameters, threshold, scale, offset):
        return super().logits(features, parameters, threshold, scale, offset).flip(1)


class ThreeLogits(Mean):
    def logits(self, features, parameters, threshold, scale, offset):
        return torch.zeros(len(features), 3)


def of(**methods):
    return type("Own", (Mean,), methods)()


@pytest.mark.parametrize(
    ("readout", "error", "message"),
    [
        (of(fit=lambda self, x, y: x), InvalidArgumentError, r"fit\(\) returned Tensor, expected a dict of tensors"),
        (of(fit=lambda self, x, y: {"w": x[0]}), InvalidArgumentError, r"'w' of shape \(5, 3\), expected 2 rows"),
        (of(score=lambda self, x, p: x), InvalidArgumentError, r"score\(\) came to \(2, 5, 3\) .* so \(2, 5\) in all"),
        (of(score=lambda self, x, p: p["w"]), DataError, r"readout: Own\(\) raised KeyError"),
        (Contrary(), InvalidArgumentError, r"predicts another class than score\(\) for 5 of 5 measured points"),
        (ThreeLogits(), InvalidArgumentError, r"logits\(\) returned \(5, 3\) for 5 rows"),
    ],
)
def test_classes_that_contradict_themselves_are_refused(readout, error, message):
    features, planted = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)), torch.arange(5) >= 4
    features[:, 4] += 10

    def checked():
        parameters, scores = fitted(readout, features, planted)
        check_logits(readout, features, parameters, scores, scores[:, 4] - 1, torch.ones(2, dtype=torch.float64))

    with pytest.raises(error, match=message):
        checked()


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


def test_draws_are_repeated_for_the_same_batch_alone():
    x, drawn = torch.rand(4, 3), Drawn(Noise(), 5, seed=1)
    state = torch.get_rng_state()
    first = drawn(x)
    assert first.shape == (4, 5, 3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(drawn(x), first)
    noise = (first - x[:, None]).flatten()
    others = (Drawn(Noise(), 5, seed=2)(x) - x[:, None], Drawn(Noise(), 5, seed=1)(x + 1) - x[:, None] - 1)
    for values in (noise, *(other.flatten() for other in others)):
        assert len(values.unique()) == 60
        assert 0.07 < float(values.std()) < 0.13
    assert not torch.isclose(noise, others[0].flatten()).any()


@pytest.mark.parametrize("draws", [2, 5, 6])
def test_a_majority_of_draws_decides(draws):
    """Against a count over draws; the fit is that of all draws as points of their own."""
    generator = torch.Generator().manual_seed(draws)
    features, planted = torch.randn(3, 20, draws, 4, generator=generator), torch.arange(20) >= 18
    features[:, 18:] += 4
    readout = Majority(readout=Logistic(), draws=draws)
    parameters = readout.fit(features, planted)
    flat = torch.stack([features[:, i, d] for i in range(20) for d in range(draws)], 1)
    single = Logistic().fit(flat, torch.arange(20 * draws) >= 18 * draws)
    torch.testing.assert_close(parameters, single)
    scores = readout.scores(features, parameters)
    for i in range(3):
        one = {name: part[i].expand(20, -1) for name, part in parameters.items()}
        torch.testing.assert_close(readout.score(features[i], one), scores[i])
        votes = torch.stack([Logistic().score(features[i, :, d], one) for d in range(draws)], 1)
        for threshold in torch.linspace(float(votes.min()) - 1, float(votes.max()) + 1, 30):
            assert torch.equal(2 * (votes > threshold).sum(1) > draws, scores[i] > threshold)


def test_what_lasts_is_above_the_boundary_at_nearly_every_majority():
    """By simulation: of planted points with normal scores, the share that loses a fresh vote."""

    class First(Linear):
        def directions(self, features, planted):
            return torch.eye(1, features.shape[2], dtype=torch.float64).expand(len(features), -1)

    generator, problems = torch.Generator().manual_seed(0), 4000
    for draws in (5, 9, 21):
        readout = Majority(readout=First(), draws=draws)
        parameters = {"weight": torch.ones(problems, 1), "anchor": torch.zeros(problems, 1)}
        parameters = {name: part.double() for name, part in parameters.items()}
        again = torch.randn(problems, 1, 7 * draws, 1, generator=generator)
        edge = readout.lasting(again, parameters)[:, 0]
        fresh = readout.score(torch.randn(problems, draws, 1, generator=generator), parameters)
        assert float((fresh <= edge).double().mean()) < 0.01
        assert float(edge.median()) < float(fresh.median())


@pytest.mark.parametrize("text", READOUTS)
def test_copies_and_pickles_read_alike(text):
    members = () if len(as_readout(text).axes) == 1 else (3,)
    features = torch.randn(2, 30, *members, 4, generator=torch.Generator().manual_seed(1))
    features[:, 29] += 5
    readout = as_readout(text)
    parameters = readout.fit(features, torch.arange(30) >= 29)
    values = {"threshold": readout.scores(features, parameters)[:, 29], "scale": torch.ones(2), "offset": torch.ones(2)}
    module = BinarizedClassifier(nn.Identity(), references=torch.rand(2, 1), readout=readout, **values, **parameters)
    expected = module.read(features[:, 3], None)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        assert torch.equal(other.read(features[:, 3], None), expected)
