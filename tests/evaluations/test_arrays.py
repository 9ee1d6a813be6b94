"""Every evaluation takes numpy arrays, one-hot labels, a device, and a model that returns more than logits."""

import numpy as np
import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from tests.evaluations.small import call, timeless
from tests.evaluations.subjects import rounded, spread

LINF = ThreatModel(norm="linf", epsilon=0.1)
ATTACK = "robust_ext:APGD(steps=3)"
X = torch.rand(6, 1, 6, 6, generator=torch.Generator().manual_seed(0))


class Output(nn.Module):
    """A classifier that returns its logits in a dict, as those of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU())
        self.head = nn.Linear(24, 5)
        self.eval()

    def forward(self, x):
        features = self.body(x)
        return {"logits": self.head(features), "hidden_states": features}


CASES = {
    "binarization": {"depths": (1,), "layer": "head"},
    "binarization with a detector": {"detector": spread, "detector_data": X, "detector_fpr": 0.2},
    "robust_accuracy": {},
    "mead": {"detector_data": X, "detector_fpr": 0.2},
    "test_time": {"defense": rounded},
    "diagnosis": {"inner_points": 30, "planted": 4, "judge_seed": 0},
}


def outcome(result):
    """What a result holds, without times."""
    keys = ("verdict", "static", "defended", "robust_accuracy", "detectors", "likely", "samples")
    inside = result.content.get("tests", {"": result.content}).values()
    return [one["settings"]["inputs"] for one in inside], timeless([result.content.get(key) for key in keys])


@pytest.mark.parametrize("name", CASES)
def test_numpy_arrays_on_a_device_give_the_run_of_tensors_for_a_model_with_an_hf_output(name):
    model = Output()
    labels = model(X)["logits"].argmax(1)

    def evaluate(model, x, y, **given):
        return call(name.split()[0], model, ATTACK, x, y, LINF, **CASES[name], **given)

    expected = outcome(evaluate(model, X, labels))
    arrays = X.numpy().astype(np.float64), np.eye(5)[labels.numpy()]
    assert outcome(evaluate(model, *arrays, device="cpu")) == expected


def test_numpy_arrays_can_be_planted_in_and_scored():
    planted = robust_ext.plant(Output(), X.numpy(), LINF, inner_points=30, device="cpu")
    assert planted.score(planted.planted[:, 0].numpy()) == 1
