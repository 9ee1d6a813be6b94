"""Mixup inference: mixes against explicit loops."""

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.casestudies.mixup_inference import MeanSoftmax, MixedFeatures, WithoutMixing
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import seeded_globals, stream
from robust_ext.core.target import Target


@pytest.fixture
def parts():
    """A network on 4 values whose prediction is the largest of the first three, and a pool whose images are known."""
    last = nn.Linear(4, 3, bias=False)
    last.weight.data = torch.eye(3, 4)
    pool = torch.arange(3 * 5 * 4.0).view(3, 5, 4) / 60
    return MixedFeatures(nn.Identity(), last, pool, mixes=7, weight=0.6).eval(), MeanSoftmax(last).eval()


@pytest.mark.parametrize("fixed", [False, True])
def test_mixes_and_their_mean_as_in_a_loop(parts, fixed):
    mixed, mean = parts
    x = torch.rand(6, 4, generator=stream(0))
    part = mixed.fixed(3) if fixed else mixed
    with seeded_globals(1):
        features = part(x)
    assert features.shape == (6, 7, 4)
    partners = (features - 0.6 * x[:, None]) / 0.4
    flat = mixed.pool.flatten(0, 1)
    for row, own in zip(partners, x, strict=True):
        for partner in row:
            # One of the pool, and of another class than the predicted one.
            distance = (flat - partner).abs().amax(1)
            assert distance.min() < 1e-5
            assert int(distance.argmin()) // 5 != int(own[:3].argmax())
    probabilities = sum(features[:, draw, :3].softmax(1) for draw in range(7)) / 7
    torch.testing.assert_close(mean(features).exp(), probabilities)


def test_fixed_mixes_repeat_and_others_do_not(parts):
    mixed, x = parts[0], torch.rand(6, 4)
    assert not torch.equal(mixed(x), mixed(x))
    once = mixed.fixed(0)
    assert torch.equal(once(x), once(x))
    # A row's mixes do not depend on other rows.
    assert torch.equal(once(x[2:3]), once(x)[2:3])


def test_without_mixing_is_the_attack_on_the_network(parts):
    mixed, mean = parts
    x, y, model = torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), ThreatModel(norm="linf", epsilon=0.1)
    attack = ObjectivePGD(steps=5, rel_step_size=0.3, start="input")

    def search(one, module):
        target = Target(module=module, bounds=(0, 1), classes=3, input_shape=(4,), device=x.device)
        return one.search(target, x, y, threat_model=model, generator=stream(0))

    alone = search(attack, nn.Sequential(mixed.bare(), mean).eval())
    assert torch.equal(search(WithoutMixing(attack=attack), nn.Sequential(mixed, mean).eval()), alone)
    with pytest.raises(AttackRefusedError, match="nothing to exchange"):
        search(WithoutMixing(attack=attack), nn.Linear(4, 3))
