"""The search along the boundary of networks that are not piecewise affine, against grids and other attacks."""

import pytest
import torch
from torch import nn

from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.core.random import stream
from robust_ext.core.threat import NORMS, ThreatModel
from tests.attacks.linear_region.test_solver import ORDER
from tests.attacks.problems import images, predicted, target_of

SMALL = {"draws": 4, "start_steps": 20, "survivors": 3, "hops": 4}


class Attention(nn.Module):
    """Softmax attention over values as tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Linear(1, 4), nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x):
        tokens = self.embed(x.unsqueeze(2) * 4)
        return (tokens + self.mix(tokens, tokens, tokens)[0]).flatten(1)


def smooth_net(kind, values, classes=3, seed=0):
    """A small drawn network of which every class has some of the unit box."""
    middle = {
        "gelu": lambda: [nn.Linear(values, 8), nn.GELU()],
        "attention": lambda: [Attention(), nn.Linear(4 * values, 8), nn.Tanh()],
        "group norm": lambda: [nn.Linear(values, 8), nn.GroupNorm(2, 8), nn.SiLU()],
    }[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(*middle(), nn.Linear(8, classes)).eval()
    points = torch.rand(200, values, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = network(points)
        network[-1].bias -= logits.mean(0)
    return network.requires_grad_(True)


def attack(network, inputs, *, norm, **chosen):
    target = target_of(network, tuple(inputs.shape[1:]), 3)
    threat_model = ThreatModel(norm=norm, epsilon=0.1, bounds=(0.0, 1.0))
    labels = predicted(network, inputs)
    attacked = BoundarySearch(**{**SMALL, **chosen})
    return labels, attacked.run(target, inputs, labels, threat_model=threat_model, generator=stream(0))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", ["gelu", "attention", "group norm"])
def test_the_smallest_perturbation_in_the_plane_is_that_of_a_fine_grid(kind, norm):
    network, inputs = smooth_net(kind, 2), images(3, (2,), seed=4)
    labels, found = attack(network, inputs, norm=norm)
    axis = torch.linspace(0, 1, 401, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    classes = predicted(network, grid.float())
    assert len(classes.unique()) > 1
    cell = float(torch.linalg.vector_norm(torch.ones(2) / 400, ord=ORDER[norm]))
    for row in range(3):
        offsets = grid[classes != labels[row]] - inputs[row].double()
        nearest = float(torch.linalg.vector_norm(offsets, ord=ORDER[norm], dim=1).min())
        assert nearest - 2 * cell <= float(found.distances[row]) <= 1.02 * nearest + cell / 4
    assert bool((predicted(network, found.candidates) != labels).all())
