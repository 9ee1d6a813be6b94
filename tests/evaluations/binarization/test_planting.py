"""Problems attacked by hand, and what plants some where a detector rejects all."""

import re
from ast import literal_eval

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.core.errors import AttackError, InvalidArgumentError, ModelError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import plant
from robust_ext.evaluations.binarization.verdict import pair_verdict

QUICK = {"inner_points": 100}


def test_inputs_are_class_0_and_planted_points_class_1(network, digits, linf):
    planted = plant(network, digits[:20], linf, **QUICK)
    assert planted.samples == tuple(range(20))
    assert torch.equal(planted.inputs, digits[:20])
    assert planted.module(planted.inputs).argmax(1).tolist() == [0] * 20 == planted.labels.tolist()
    assert planted.module(planted.planted[:, 0]).argmax(1).tolist() == [1] * 20
    assert planted.score(planted.planted[:, 0]) == 1.0
    assert planted.score(planted.inputs) == 0.0


def test_the_problems_are_those_of_the_test(network, digits, linf, pgd):
    result = robust_ext.binarization_test(network, pgd(), digits[:12], linf, canaries=0, **QUICK)
    planted = plant(network, digits[:12], linf, **QUICK)
    candidates = pgd()(planted.module, planted.inputs, planted.labels, linf)
    weak = pgd(steps=2, relative_step=0.05)(planted.module, planted.inputs, planted.labels, linf)
    assert planted.score(candidates) == result.content["attacks"][0]["score"]
    assert planted.score(weak) < planted.score(candidates)
    assert planted.verify(weak).outcomes.count("not_adversarial") > 0


def test_groups_make_no_difference(network, digits, linf):
    together, apart = (plant(network, digits[:9], linf, batch_size=size, **QUICK) for size in (9, 4))
    assert torch.equal(together.planted, apart.planted)
    torch.testing.assert_close(together.module(together.inputs), apart.module(apart.inputs), rtol=1e-3, atol=1e-3)


def test_a_single_problem_takes_any_points(network, digits, linf):
    planted = plant(network, digits[:6], linf, **QUICK)
    far = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    one = planted.single(2)
    assert (len(one), one.samples) == (1, (2,))
    torch.testing.assert_close(one.module(planted.inputs[2:3]), planted.module(planted.inputs[2:3]))
    assert one.module(far).shape == (40, 2)
    with pytest.raises(InvalidArgumentError, match="row: got 6, expected an integer from 0 to 5"):
        planted.single(6)
    with pytest.raises(AttackError, match="expected one candidate an input"):
        planted.score(planted.inputs[:2])


def test_the_network_is_left_as_it_was(network, digits, linf):
    before = {name: value.clone() for name, value in network.state_dict().items()}
    planted = plant(network, digits[:4], linf, **QUICK)
    planted.module(planted.inputs).sum().backward()
    for parameter in network.parameters():
        parameter.grad = None
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_what_cannot_be_planted_is_said(network, digits, linf):
    with pytest.raises(InvalidArgumentError, match="inputs: got some that are not two epsilon apart"):
        plant(network, torch.cat([digits[:3], digits[:1] + 1e-3]).clamp(0, 1), linf, **QUICK)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.Linear(2, 3)).eval()
    nn.init.zeros_(flat[1].weight)
    with pytest.raises(ModelError, match="in none of the 3 inputs could anything be planted"):
        plant(flat, digits[:3], linf, **QUICK)
    with pytest.raises(InvalidArgumentError, match="did you mean inner_points"):
        plant(flat, digits[:3], linf, inner_point=3)
    with pytest.raises(InvalidArgumentError, match="inputs: got no samples"):
        plant(flat, digits[:0], linf)


def _dark(x):
    """What lies in pixels that should be black: of noise there, little or much."""
    return (x * (x < 0.15)).mean((1, 2, 3))


def _grey(x):
    """The share of values off the grid of clean digits, on which no point of a ball lies."""
    return ((x * 16 - (x * 16).round()).abs() > 1e-4).double().mean((1, 2, 3)) + 1e-3 * x.mean((1, 2, 3)).double()


@pytest.mark.parametrize(
    ("score", "rate", "settings", "plants"),
    [
        (_dark, 0.1, {}, True),
        (_dark, 0.2, {}, True),
        (_dark, 0.1, {"boundary": "corners", "boundary_points": 2}, True),
        (_grey, 0.1, {}, False),
        (_grey, 0.1, {"boundary": "surface", "inner": 0.0}, False),
    ],
)
def test_a_detector_that_rejects_all_gets_settings_that_were_seen_to_plant(score, rate, settings, plants):
    data = load_dataset("digits")
    given = {"detector": score, "detector_data": data.take(range(200, 300))[0], "detector_fpr": rate, "depths": (1,)}
    given |= {"inner_points": 50, "planting_tries": 48, "canaries": 0}
    small = {"random_inner": 5, "random_corners": 5}

    def regular(**changed):
        result = robust_ext.binarization_test(
            digits_network(),
            "robust_ext:APGD(steps=3)",
            data.take(range(12))[0],
            ThreatModel(norm="linf", epsilon=0.1),
            **{**given, **small, **changed},
        )
        return result.content["attacks"][0]["tests"]["regular"]

    attack = regular(**settings)
    assert (attack["samples"], attack["verdict"]) == (0, "inconclusive")
    assert "rejected" in attack["reason"]
    assert "12 of 12" in attack["reason"]
    assert "inner_points=" not in attack["reason"]
    proposed = re.search(r"To settle it: (.*), which plants (\d+) of 12", attack["reason"])
    assert (proposed is not None) == plants
    if proposed is not None:
        changed = {name: literal_eval(value) for name, value in re.findall(r"(\w+)=([^,]+)", proposed[1])}
        assert regular(**{**settings, **changed})["samples"] == int(proposed[2]) > 0


@pytest.mark.parametrize("failed", ["regular", "inverted"])
def test_nothing_planted_in_one_test_shows_nothing_of_the_detector(failed):
    other = {"regular": "inverted", "inverted": "regular"}[failed]
    tests = {
        failed: {"verdict": "failed", "score": 0.2, "reason": "Missed."},
        other: {"verdict": "inconclusive", "score": None, "reason": "None."},
    }
    verdict, reason = pair_verdict(tests)
    assert verdict == "failed"
    assert "ignores the detector" not in reason
