"""k-winners-take-all: the layer against a loop, and both recipes on the digits."""

from __future__ import annotations

import pytest
import torch

from robust_ext.casestudies.k_winners import Winners
from tests.casestudies.on_digits import judged, measured


def test_winners():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 2)
    loop = torch.zeros_like(x)
    for row, out in zip(x.flatten(1), loop.flatten(1), strict=True):
        for place in row.argsort(descending=True)[:4]:
            out[place] = row[place]
    assert torch.equal(Winners()(x), loop)


@pytest.mark.parametrize(("values", "stay"), [((2.0, 2.0, 1.0), (2.0, 2.0, 0.0)), ((-3.0, -1.0), (0.0, -1.0))])
def test_ties_and_small_layers(values, stay):
    assert torch.equal(Winners()(torch.tensor([values])), torch.tensor([stay]))


def test_mechanism():
    found = measured("k_winners")
    assert found.present, found.values


@pytest.mark.exhaustive
def test_recipes_on_digits():
    weak = judged("k_winners", "weak")
    assert weak["verdict"] == "failed"
    assert weak["findings"][0]["code"] == "wrong_gradient"
    assert judged("k_winners", "right")["verdict"] == "passed"
