"""Networks in half, bfloat16, double and under autocast: what is planted holds, and attacks are told apart."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, binarization_test, plant
from robust_ext.core.devices import precision_of, tolerance_of
from robust_ext.demo.network import digits_network

LINF = ThreatModel(norm="linf", epsilon=0.1)
SETTINGS = {"inner_points": 60, "planted_candidates": 1, "depths": (1,), "seed": 0}


class Autocast(nn.Module):
    """A network under autocast."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.network(x)


FORMS = {
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "double": nn.Module.double,
    "autocast": Autocast,
}


@pytest.mark.parametrize("form", FORMS)
def test_in_its_own_precision_a_good_attack_passes_and_a_weak_one_fails(form, digits):
    network = FORMS[form](copy.deepcopy(digits_network()))
    attacks = {
        "climbing": "robust_ext:APGD(steps=20, loss='margin')",
        "one small step": lambda model, x, y: (x + 0.001).clamp(0, 1),
    }
    result = binarization_test(network, attacks, digits[:6], LINF, **SETTINGS)
    scores = {entry["name"]: entry["score"] for entry in result.content["attacks"]}
    assert scores["climbing"] == 1
    assert scores["one small step"] < 0.5
    planted = plant(network, digits[:6], LINF, inner_points=60)
    assert planted.samples == tuple(range(6))
    assert planted.score(planted.planted[:, 0]) == 1
    assert planted.score(planted.inputs) == 0
    assert {p.dtype for p in network.parameters()} <= {torch.float16, torch.bfloat16, torch.float64, torch.float32}


def test_tolerances_follow_from_the_coarsest_type():
    layers = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2))
    assert tolerance_of(layers, single=1e-4) == 1e-4
    layers[0].half()
    assert precision_of(layers) == torch.float16
    assert tolerance_of(layers, single=1e-4) == pytest.approx(16 * 2**-10)
    assert tolerance_of(layers, torch.zeros(1, dtype=torch.bfloat16), single=1e-4) == pytest.approx(16 * 2**-7)
