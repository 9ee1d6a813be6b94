"""Regions: constraints and affine maps against matrices written out by hand, and against the network on both sides."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from robust_ext.attacks.linear_region.network.recording import record
from tests.attacks.linear_region.test_recording import check_adjoint, product, seeded
from tests.attacks.problems import Lambda

EXAMPLES = Path(__file__).parents[3] / "examples" / "networks.py"


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def written_out(regions):
    """The matrices of one row's constraints and logits, column by column."""
    values = torch.Size(regions.shape).numel()
    whole = regions.select(torch.zeros(values, dtype=torch.int64))
    constraints, logits = product(whole, torch.eye(values, dtype=torch.float64).view(values, *regions.shape))
    return constraints.T, logits.T


def perceptron():
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))


def test_matrices_of_a_small_network_are_those_of_the_paper():
    network = seeded(perceptron).double()
    first, second, third = (network[i] for i in (0, 2, 4))
    x = drawn(4, 5) - 0.5
    regions = record(network, x)
    for row in range(4):
        with torch.no_grad():
            v1, b1 = first.weight, first.bias
            sign1 = torch.where(v1 @ x[row] + b1 > 0, 1.0, -1.0).double()
            gate1 = torch.diag((sign1 + 1) / 2)
            v2, b2 = second.weight @ gate1 @ v1, second.weight @ gate1 @ b1 + second.bias
            sign2 = torch.where(v2 @ x[row] + b2 > 0, 1.0, -1.0).double()
            gate2 = torch.diag((sign2 + 1) / 2)
            v3, b3 = third.weight @ gate2 @ v2, third.weight @ gate2 @ b2 + third.bias
        matrix = torch.cat([sign1[:, None] * v1, sign2[:, None] * v2])
        offset = torch.cat([sign1 * b1, sign2 * b2])
        one = regions.select(torch.tensor([row]))
        constraints, logits = written_out(one)
        offsets, biases = one.forward(torch.zeros(1, 5, dtype=torch.float64))
        y, v = drawn(1, 13, seed=1), drawn(1, 3, seed=2)
        found = constraints, logits, offsets[0], biases[0], one.adjoint(y, v)[0]
        expected = matrix, v3, offset, b3, y[0] @ matrix + v[0] @ v3
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert regions.layers == (("relu", slice(0, 7)), ("relu", slice(7, 13)))


def test_constraints_of_max_pooling_are_winner_minus_others():
    network = nn.Sequential(nn.MaxPool2d(2), nn.Flatten())
    x = drawn(3, 2, 4, 6)
    regions = record(network, x)
    winner = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(3, 12, 4).argmax(-1, keepdim=True)
    # Of other points too, where the winner of the recorded point may have lost.
    for z in (x, drawn(3, 2, 4, 6, seed=1)):
        windows = z.unfold(2, 2, 2).unfold(3, 2, 2).reshape(3, 12, 4)
        values = regions.forward(z)[0].view(3, 2, 4, 6).transpose(2, 3).reshape(3, 12, 4)
        torch.testing.assert_close(values, windows.gather(-1, winner) - windows, rtol=0, atol=0)
    assert bool((values < 0).any())


@pytest.mark.parametrize("bounds", [(-0.2, 0.3), (0.0, 0.0)])
def test_both_limits_of_a_hardtanh_are_constraints(bounds):
    x = torch.tensor([[-1.0, 0.1, 0.2, 0.9]], dtype=torch.float64)
    constraints, logits = record(Lambda(lambda x: x.clamp(*bounds)), x).forward(x)
    expected = torch.cat([(x - bounds[0]).abs(), (x - bounds[1]).abs()], 1)
    torch.testing.assert_close(constraints, expected)
    torch.testing.assert_close(logits, x.clamp(*bounds))


def activations(network, x):
    """Which values the network's own activations let through, and which each pool picks, seen by hooks."""
    seen = []

    def look(module, args):
        pools = isinstance(module, nn.MaxPool2d)
        choices = F.max_pool2d(args[0], module.kernel_size, return_indices=True)[1] if pools else (args[0] > 0).long()
        seen.append(choices.flatten(1))

    handles = [m.register_forward_pre_hook(look) for m in network.modules() if isinstance(m, (nn.ReLU, nn.MaxPool2d))]
    network(x)
    for handle in handles:
        handle.remove()
    return torch.cat(seen, 1)


@pytest.mark.parametrize("seed", range(3))
def test_constraints_agree_where_the_choice_does(seed):
    network = seeded(convolutional, seed).double()
    x = drawn(6, 2, 6, 6, seed=seed)
    z = x + 0.3 * drawn(6, 2, 6, 6, seed=seed + 10)
    here = record(network, x)
    there = here.at(z)
    same = here.agrees(there)
    assert 0.1 < float(same.double().mean()) < 0.99
    assert torch.equal(same, there.agrees(here))
    assert bool(here.agrees(here).all())
    choices = activations(network, x) == activations(network, z)
    # 64 values, 16 windows of 4, and 45 values; the order inside a layer is the layer's own.
    (_, first), (_, pool), (_, last) = here.layers
    for layer, times, seen in ((first, 1, slice(64)), (pool, 4, slice(64, 80)), (last, 1, slice(80, None))):
        assert torch.equal(same[:, layer].sum(1), times * choices[:, seen].sum(1))
    # A constraint that agrees has the same sign at both points, and a ReLU's that does not has another.
    values = there.forward(z)[0] * here.forward(z)[0]
    assert bool((values[:, first][same[:, first]] >= 0).all())
    assert bool((values[:, first][~same[:, first]] <= 0).all())


def convolutional():
    first = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(4, 5, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 9, 3))


NETWORKS = {"wong_kolter_mnist": (1, 28, 28), "mead_mnist": (1, 28, 28), "resnet20": (3, 32, 32)}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_published_networks(name, dtype, tolerance):
    network = seeded(runpy.run_path(str(EXAMPLES))[name]).to(dtype)
    x = drawn(2, *NETWORKS[name], dtype=dtype)
    regions = record(network, x)
    constraints, logits = regions.forward(x)
    scale = float(regions.logits.abs().max())
    torch.testing.assert_close(logits, network(x), rtol=tolerance, atol=tolerance * scale)
    assert bool((constraints >= -tolerance * scale).all())
    check_adjoint(regions, x, tolerance)
    # The gradient of the logits is that of the network.
    v = drawn(2, 10, dtype=dtype, seed=3)
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(network(point), point, v)
    found = regions.adjoint(torch.zeros_like(constraints), v)
    torch.testing.assert_close(found, gradient, rtol=tolerance, atol=tolerance * 10 * float(gradient.abs().max()))
    nearby = x + tolerance * 1e-4 * drawn(2, *NETWORKS[name], dtype=dtype, seed=1)
    assert regions.pattern() == record(network, nearby).pattern() or dtype == torch.float32


def test_no_image_and_one_image():
    network = seeded(convolutional).double()
    regions, one = (record(network, drawn(rows, 2, 6, 7)) for rows in (0, 1))
    constraints, logits = regions.forward(drawn(0, 2, 6, 7))
    assert constraints.shape == (0, one.constraints)
    assert logits.shape == regions.logits.shape == (0, 3)
    assert regions.adjoint(constraints, logits).shape == (0, 2, 6, 7)
    assert regions.pattern() == []
    assert one.forward(drawn(1, 2, 6, 7))[0].shape == (1, one.constraints)


def test_a_network_without_choices_has_one_region():
    network = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3))).double()
    regions = record(network, drawn(2, 2, 3))
    constraints, logits = regions.forward(drawn(2, 2, 3, seed=1))
    assert (regions.constraints, constraints.shape) == (0, (2, 0))
    assert regions.pattern()[0] == regions.pattern()[1]
    back = regions.adjoint(constraints, torch.ones_like(logits))
    torch.testing.assert_close(back[0].flatten(), network[1].weight.sum(0).detach())
    assert bool((regions.adjoint(constraints) == 0).all())
