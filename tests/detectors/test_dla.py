"""Dense-layer analysis: its inputs, what it computes, how it is trained."""

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.demo.network import digits_network
from robust_ext.detectors.dla import DLADetector
from tests.detectors.cases import data, fitted, network

# Of the scaled exponential linear unit (Klambauer et al. 2017).
ALPHA, SCALE = 1.6732632423543772, 1.0507009873554805


def selu(value):
    return SCALE * value if value > 0 else SCALE * ALPHA * (np.exp(value) - 1)


@pytest.mark.parametrize("layers", [["5"], ["2", "5"], []])
def test_scores_are_those_of_the_formula(layers):
    classifier, x = network(), data(6, seed=4)
    detector = fitted("dla", classifier, layers=layers)
    parameters = [p.numpy().astype(np.float64) for p in detector.alarm.parameters()]
    hidden = [classifier[:end](x).flatten(1).detach().numpy() for end in (3, 6)]
    for row, score in enumerate(detector.score(x).tolist()):
        seen = {"2": hidden[0][row], "5": hidden[1][row]}
        values = np.concatenate([*(seen[name] for name in layers), classifier(x)[row].detach().numpy()])
        for position in range(0, len(parameters), 2):
            weight, bias = parameters[position], parameters[position + 1]
            values = np.array([weight[unit] @ values + bias[unit] for unit in range(len(bias))])
            if position + 2 < len(parameters):
                values = np.array([selu(value) for value in values])
        assert values.shape == (1,)
        assert score == pytest.approx(float(values[0]), abs=1e-5)


def test_sizes_are_those_of_the_reference():
    with torch.random.fork_rng(devices=[]):
        classifier = nn.Sequential(nn.Flatten(), nn.Linear(30, 512), nn.ReLU(), nn.Linear(512, 10)).eval()
    detector = DLADetector(classifier, layers=["2"])
    detector.fit(data(8), data(8, 1), epochs=1)
    shapes = [tuple(p.shape) for p in detector.alarm.parameters() if p.dim() == 2]
    assert shapes == [(100, 522), (50, 100), (10, 50), (1, 10)]
    assert [type(part) for part in detector.alarm[1::2]] == [nn.SELU] * 3


def test_feature_maps_are_flattened_and_training_lowers_the_loss():
    detector = DLADetector(digits_network(), layers=["3", "6"], widths=[4])
    detector.fit(torch.rand(6, 1, 8, 8), torch.rand(6, 1, 8, 8), epochs=1)
    assert detector.features == 32 * 4 * 4 + 128 + 10
    losses = DLADetector(network(), layers=["5"]).fit(data(40), data(20, 1).square(), epochs=30)
    assert len(losses) == 30
    assert losses[-1] < losses[0]


def test_both_kinds_weigh_the_same():
    # Without anything to tell them apart the best output is the log-odds of the two kinds' weights, which is 0.
    detector = DLADetector(network(), layers=[], widths=[4])
    same = data(1)
    detector.fit(same.expand(90, 1, 6, 5), same.expand(10, 1, 6, 5), epochs=300, batch_size=100, learning_rate=0.01)
    assert abs(detector.score(same).item()) < 0.05
