"""Thermometer codes: the code and the authors' attack against loops."""

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel
from robust_ext.casestudies.thermometer import LogitSpacePGA, Standardise, ThermometerCode, mean_code
from robust_ext.core.random import stream
from robust_ext.core.target import Target


def test_code():
    # Away from the ends of levels, where rounding decides; with the ends of the bounds.
    values = torch.tensor([0.0, 0.01, 0.33, 0.5, 0.7, 0.99, 1.0]).expand(2, 3, 1, -1)
    code = ThermometerCode()(values)
    loop = torch.zeros(2, 48, 1, 7)
    for channel in range(3):
        for bit in range(16):
            for place, value in enumerate(values[0, 0, 0].tolist()):
                loop[:, 16 * channel + bit, 0, place] = float(int(15.9998 * value) >= bit)
    assert torch.equal(code, loop)


def test_mean_code_is_the_mean():
    torch.manual_seed(0)
    shares = torch.rand(1, 1, 16, 1, 1).softmax(2)
    codes = ThermometerCode()((torch.arange(16.0) / 16 + 0.03).view(16, 1, 1, 1))
    wanted = (shares.flatten()[:, None] * codes.flatten(1)).sum(0)
    torch.testing.assert_close(mean_code(shares).flatten(), wanted)


def test_standardised_rows():
    rows = Standardise()(3 * torch.rand(4, 2, 3, 3) + 7)
    torch.testing.assert_close(rows.mean((1, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std((1, 2, 3), unbiased=False), torch.ones(4))


class OneBit(nn.Module):
    """Class 1 by the sum of the bits, so that more levels are better for label 0."""

    def __init__(self):
        super().__init__()
        self.encode = ThermometerCode()

    def forward(self, x):
        bits = self.encode(x).flatten(1).sum(1)
        return torch.stack([-bits, bits], 1) / 100


@pytest.mark.parametrize("signed", [False, True])
def test_the_attack_goes_to_the_outermost_level(signed):
    x, model = torch.tensor([[[[0.5, 0.02, 0.9]]]]), ThreatModel(norm="linf", epsilon=0.1)
    target = Target(module=OneBit().eval(), bounds=(0, 1), classes=2, input_shape=(1, 1, 3), device=x.device)
    attack = LogitSpacePGA(signed=signed)
    for label, end in ((0, 0.1), (1, -0.1)):
        given = {"threat_model": model, "generator": stream(0)}
        found = attack.search(target, x, torch.tensor([label]), **given)
        wanted = (x + end).clamp(0, 1)
        assert torch.equal((15.9998 * found).floor(), (15.9998 * wanted).floor())
        assert bool(model.contains(found, x))
