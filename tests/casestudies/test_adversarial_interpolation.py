"""Adversarial interpolation: its inputs and labels against loops."""

import pytest
import torch
from torch import nn

from robust_ext import binarization_test
from robust_ext.casestudies.adversarial_interpolation import interpolated_inputs, interpolated_labels
from robust_ext.core.random import seeded_globals
from tests.casestudies.on_digits import on_digits


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


@pytest.mark.exhaustive
def test_a_single_step_which_it_is_trained_against_misses_what_is_there():
    _, case = on_digits("adversarial_interpolation")
    fgsm = "robust_ext:ObjectivePGD(algorithm='fgsm')"
    assert binarization_test(case.module, fgsm, case.inputs[:64], case.threat_model, depths=(1,)).verdict == "failed"
