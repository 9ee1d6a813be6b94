"""Adversarial interpolation: its inputs and labels against loops, and both recipes on the digits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, binarization_test
from robust_ext.casestudies.adversarial_interpolation import (
    AdversarialInterpolation,
    interpolated_inputs,
    interpolated_labels,
)
from robust_ext.core.random import seeded_globals
from robust_ext.datasets import load_dataset

LINF = ThreatModel(norm="linf", epsilon=0.3)


def test_labels_as_in_a_loop():
    labels, partners = torch.tensor([0, 1, 2, 3]), torch.tensor([3, 2, 2, 0])
    found = interpolated_labels(labels, partners, 4)
    for row, y, other in zip(found, labels, partners, strict=True):
        loop = torch.tensor([0.5 * (k == int(y)) + 0.5 / 3 * (k != int(other)) for k in range(4)])
        torch.testing.assert_close(row, loop)


def test_inputs_go_to_their_partners_on_a_linear_map():
    # With features that are the inputs, the cosine's gradient is p / (|p||x|) - (p.x) x / (|p||x|^3).
    torch.manual_seed(0)
    inputs = torch.rand(5, 6) * 0.4 + 0.3
    partners, epsilon = inputs.flip(0), 0.1
    with seeded_globals(7):
        found = interpolated_inputs(nn.Identity(), inputs, partners, epsilon)
    with seeded_globals(7):
        start = inputs - epsilon + 2 * epsilon * torch.rand_like(inputs)
    sizes = [(p.norm(), x.norm(), p @ x) for p, x in zip(partners, start, strict=True)]
    gradients = [p / (a * b) - c * x / (a * b**3) for (a, b, c), p, x in zip(sizes, partners, start, strict=True)]
    wanted = start + epsilon * torch.stack(gradients).sign()
    torch.testing.assert_close(found, torch.maximum(torch.minimum(wanted, inputs + epsilon), inputs - epsilon))


@pytest.fixture(scope="session")
def trained():
    train, test = load_dataset("digits", split="train"), load_dataset("digits")
    study = AdversarialInterpolation()
    return study, study.trained(*train.take(range(len(train)))), test.take(test.choose(64, seed=0))


@pytest.mark.exhaustive
def test_mechanism_and_recipes(trained):
    study, module, (inputs, labels) = trained
    found = study.measure(module, inputs, labels, LINF, seed=0)
    assert found.present, found.values
    result = binarization_test(module, study.right(LINF).attack, inputs, LINF, depths=(1,))
    assert result.verdict == "passed", str(result)
    # A single step, against which the network is trained, misses what is there.
    result = binarization_test(module, "robust_ext:ObjectivePGD(algorithm='fgsm')", inputs, LINF, depths=(1,))
    assert result.verdict == "failed", str(result)
