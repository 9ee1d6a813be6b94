"""Prototype conformity: the loss against loops, and both recipes on the digits."""

from __future__ import annotations

import pytest
import torch

from robust_ext.casestudies.pcl import conformity
from tests.casestudies.on_digits import judged, measured


def test_conformity():
    torch.manual_seed(0)
    features, centres, labels = torch.randn(5, 3), torch.randn(4, 3), torch.tensor([0, 3, 1, 1, 2])
    total = 0.0
    for row, label in zip(features, labels.tolist(), strict=True):
        total += float(((row - centres[label]) ** 2).sum())
        others = [float(((centres[label] - centre) ** 2).sum()) for k, centre in enumerate(centres) if k != label]
        total -= 0.3 * sum(others) / len(others)
    torch.testing.assert_close(float(conformity(features, centres, labels, push=0.3)), total / 5)


def test_mechanism():
    found = measured("pcl")
    assert found.present, found.values


@pytest.mark.exhaustive
def test_recipes_on_digits():
    weak = judged("pcl", "weak")
    assert weak["verdict"] == "failed"
    assert weak["findings"][0]["code"] == "saturated_loss"
    assert judged("pcl", "right", samples=64)["verdict"] == "passed"
