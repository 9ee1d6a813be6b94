"""EMPIR: its parts against loops."""

from collections import Counter

import pytest
import torch

from robust_ext.casestudies.empir import Members, QuantisedConv, Vote, quantise


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_values_go_to_the_nearest_step_with_the_gradient_of_the_identity(bits):
    values = torch.rand(50, requires_grad=True)
    levels = [step / (2**bits - 1) for step in range(2**bits)]
    nearest = [min(levels, key=lambda level: abs(level - value)) for value in values.tolist()]
    out = quantise(values, bits)
    assert torch.allclose(out, torch.tensor(nearest))
    out.sum().backward()
    assert bool((values.grad == 1).all())


def test_layers_of_few_bits_by_loops():
    layer, unit = QuantisedConv(1, 8, (2, 2)).requires_grad_(False), torch.zeros(1, 1, 3, 3)
    unit[0, 0, 1, 1] = 1
    bounded = layer.weight.tanh()
    for output in range(8):
        # What a single bright value in the middle sums is the weight in the middle.
        share = float(bounded[output, 0, 1, 1] / (2 * bounded.abs().max()) + 0.5)
        weight = (2 * round(3 * share) / 3 - 1) / 3
        activation = min(max(weight + float(layer.bias[output]), 0), 1)
        assert abs(float(layer(unit)[0, output, 1, 1]) - round(3 * activation) / 3) < 1e-6


def test_the_largest_logit_is_the_majority_and_else_the_full_member():
    torch.manual_seed(0)
    members, vote = Members((1, 8, 8), 16), Vote(16, 5)
    with torch.no_grad():
        features = 3 * members(torch.rand(300, 1, 8, 8))
        choices = vote.outputs(features).argmax(2).tolist()
        found = vote(features).argmax(1).tolist()
    assert {len(set(row)) for row in choices} >= {1, 2}
    for row, decided in zip(choices, found, strict=True):
        ((winner, count),) = Counter(row).most_common(1)
        assert decided == (winner if count > 1 else row[-1])
