"""The whole test with every readout: what is planted is there, attacks are judged, and random models by majority."""

import pytest
import torch
from torch import nn

from robust_ext.core.errors import InconsistentModelError, InvalidArgumentError, RunFolderError
from robust_ext.evaluations.binarization import binarization_test, plant
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import split
from robust_ext.models.readouts.catalogue import READOUTS
from robust_ext.registry.readout import as_readout

SIZES = {"inner_points": 200, "random_inner": 20, "random_corners": 20}


class Views(nn.Module):
    """Features ``(N, 3, F)`` of several views of an image, as of an ensemble, or of mixes with fixed others."""

    def __init__(self, features, *, mixing):
        super().__init__()
        self.features, self.mixing = features, mixing
        self.eval()

    def forward(self, x):
        pattern = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
        views = [0.6 * x + 0.4 * pattern.roll(k, 3) for k in range(3)] if self.mixing else [x, x.flip(3), x.flip(2)]
        return torch.stack([self.features(view) for view in views], 1)


class Head(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.eval()

    def forward(self, features):
        return self.linear(features).mean(1)


def subject(network, inputs, text):
    """The digits network as a readout takes it."""
    parts = split(network, inputs[:2])
    if len(as_readout(text).axes) == 1:
        return network
    return Views(parts.features, mixing=text == "mixing"), Head(parts.readout)


class Noisy(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x):
        return self.network(x + 0.02 * torch.randn_like(x))


@pytest.mark.parametrize("text", [*READOUTS, "nearest(k=1)", "ensemble(combine='mean')", "code(decoder='linear')"])
def test_planted_points_survive_batched_and_alone(text, network, digits, linf):
    planted = plant(subject(network, digits, text), digits[:16], linf, readout=text, boundary_points=3, **SIZES)
    assert len(planted) >= 15
    found = together = 0
    for number in range(3):
        points = planted.planted[:, number]
        together += planted.verify(points).outcomes.count("found")
        alone = [planted.single(row).verify(points[row][None]).outcomes[0] for row in range(len(planted))]
        found += alone.count("found")
    assert min(found, together) >= 0.99 * 3 * len(planted)
    assert planted.score(planted.inputs) == 0


@pytest.mark.parametrize("text", READOUTS)
def test_attacks_are_judged(text, network, digits, linf):
    """One that climbs finds more than one that does not move, and every reach fits its outcome."""
    kappa = 0.9 if text == "nearest" else 0.999
    options = {"readout": text, "depths": (1,), "kappa": kappa, "canaries": 2, **SIZES}
    attacks = {"apgd": "robust_ext:APGD(steps=20, loss='margin')", "still": lambda model, x, y: x}
    result = binarization_test(subject(network, digits, text), attacks, digits[:12], linf, **options)
    scores = {entry["name"]: entry["score"] for entry in result.content["attacks"]}
    assert scores["still"] == 0
    assert scores["apgd"] >= 0.9
    for record in result.records:
        for done in record["attacks"].values():
            assert (done["outcome"] == "found") == (done["reach"] > kappa)


def test_a_random_model_is_judged_by_majorities(network, digits, linf):
    noisy, options = Noisy(network), {"draws": 9, "depths": (1,), "canaries": 2, **SIZES, "inner_points": 60}
    attack = "robust_ext:APGD(steps=20, loss='margin')"
    result = binarization_test(noisy, [attack, lambda model, x, y: x], digits[:12], linf, **options)
    climbing, still = result.content["attacks"]
    assert (climbing["score"], still["score"]) == (1, 0)
    assert all(done["outcome"] != "not_planted" for record in result.records for done in record["attacks"].values())
    again = binarization_test(noisy, attack, digits[:12], linf, **options)
    first = [record["attacks"][climbing["name"]] for record in result.records]
    assert first == [record["attacks"][climbing["name"]] for record in again.records]
    with pytest.raises(InconsistentModelError, match="is random"):
        binarization_test(noisy, attack, digits[:12], linf, **SIZES)


def test_attacks_are_shown_single_draws(network, digits, linf):
    seen = []

    def attack(model, x, y):
        seen.append((model(x), model(x)))
        return x

    binarization_test(Noisy(network), attack, digits[:4], linf, draws=3, depths=(1,), canaries=0, **SIZES)
    (first, second), *_ = seen
    assert not torch.equal(first, second)


def test_features_may_be_methods_and_of_several_layers(network, digits, linf):
    linear = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    assert split(network, digits[:3], layer=", ".join(linear)).shape == (512 + 128,)
    options = {"depths": (1,), **SIZES}
    attack = "robust_ext:APGD(steps=20, loss='margin')"
    result = binarization_test(network, attack, digits[:8], linf, layer=", ".join(linear), **options)
    assert result.content["attacks"][0]["score"] == 1
    parts = split(network, digits[:2])

    def features(x):
        return parts.features(x)

    by_pair = binarization_test((features, parts.readout), attack, digits[:8], linf, **options)
    whole = binarization_test(network, attack, digits[:8], linf, **options)
    assert [r["attacks"] for r in by_pair.records] == [r["attacks"] for r in whole.records]


def test_another_readout_is_refused_in_the_same_folder(tmp_path, network, digits, linf):
    file = tmp_path / "own.py"
    base = "from robust_ext.models.readouts.linear import Logistic\n\nclass Own(Logistic):\n    factor = {}\n"
    options = {"out": tmp_path / "run", "depths": (1,), "readout": f"{file}:Own", **SIZES}
    file.write_text(base.format(1))
    first = binarization_test(network, lambda model, x, y: x, digits[:4], linf, **options)
    again = binarization_test(network, lambda model, x, y: x, digits[:4], linf, **options)
    assert again == first
    file.write_text(base.format(2))
    with pytest.raises(RunFolderError, match=r"readout code: changed \(own.py\)"):
        binarization_test(network, lambda model, x, y: x, digits[:4], linf, **options)


def test_wrong_readouts_are_refused_before_any_work(network, digits, linf):
    attack = "robust_ext:APGD(steps=2)"
    with pytest.raises(InvalidArgumentError, match=r"^readout: got Ensemble.* for features of shape \(N, 128\)"):
        binarization_test(network, attack, digits[:4], linf, readout="ensemble")
    with pytest.raises(InvalidArgumentError, match=r"^readout: got 'svm', expected one of 'logistic', 'max-margin'"):
        binarization_test(network, attack, digits[:4], linf, readout="svm")


def test_settings_hold_the_readout_as_it_was_given(linf):
    settings = BinarizationSettings(threat_model=linf, readout=as_readout("nearest(k=2)"), draws=3)
    assert settings.fitting.description == "Majority(readout=Nearest(k=2), draws=3)"
    assert settings.to_dict()["readout"] == "Nearest(k=2)"
    assert BinarizationSettings(threat_model=linf, readout="code", C=2).fitting.C == 2
