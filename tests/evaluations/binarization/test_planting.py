"""Problems attacked by hand."""

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext.core.errors import AttackError, InvalidArgumentError, ModelError
from robust_ext.evaluations.binarization import plant

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
