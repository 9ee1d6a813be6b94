"""Functions that depend on how many rows they are given at once."""

import pytest
import torch

from robust_ext.core.threat import ThreatModel
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import binarization_test

L2 = ThreatModel(norm="l2", epsilon=0.6)


def descent(scaled, *, length=0.003):
    """Steps along what a function makes of gradients of single rows ``(N, ...)``."""

    def attack(model, x, y, epsilon):
        x_adv = x
        for _ in range(30):
            x_adv = x_adv.detach().requires_grad_()
            logits = model(x_adv)
            lead = logits.gather(1, 1 - y[:, None]) - logits.gather(1, y[:, None])
            (gradient,) = torch.autograd.grad(lead.sum(), x_adv)
            moved = x_adv + length * scaled(gradient) - x
            away = moved.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)
            x_adv = (x + moved * (epsilon / away).clamp(max=1)).clamp(0, 1)
        return x_adv.detach()

    return attack


def by_row(g):
    return 50 * g / g.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("attack", "found"),
    [
        (descent(lambda g: g / len(g)), True),
        (descent(lambda g: g / len(g) ** 2, length=0.02), True),
        (descent(lambda g: g / g.norm(), length=0.1), True),
        (descent(lambda g: g / g.abs().sum(), length=1.0), True),
        (descent(lambda g: g), False),
        (descent(by_row), False),
        (descent(lambda g: g.sign()), False),
        # The rows of a batch share a length, and it is enough for all sizes.
        (descent(lambda g: 400 * g / g.norm()), False),
    ],
)
def test_who_depends_on_the_batch(attack, found, digits):
    result = binarization_test(
        digits_network(), attack, digits[:16], L2, batch_size=8, depths=(1,), inner_points=100, canaries=0
    )
    assert result.content["attacks"][0]["score"] == 1
    assert [one["code"] for one in result.content["findings"]] == ["batch_size_matters"] * found
