"""Secants by closed forms; places of operations, cuts and dead nodes in traced passes."""

import math

import pytest
import torch
from torch import nn

from robust_ext.evaluations.causes.probes import probe_model
from robust_ext.evaluations.causes.secants import near_identity, secants
from robust_ext.evaluations.causes.tracing import traced
from tests.evaluations.diagnosis.models import Apply, Opposite, X, Y, Zero, inserted, jpeg, rounded, winners
from tests.evaluations.diagnosis.traces import LINF

U = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))


def compared(function, *points, seed=0):
    return secants(lambda given: [function(*given)], points or (U,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.001, 0.5, 2.0, 10.0])
def test_a_gradient_of_another_size_has_the_error_of_its_factor(factor, dtype):
    found = compared(lambda x: factor * x + (1 - factor) * x.detach(), U.to(dtype))
    expected = abs(1 - factor) / (1 + factor)
    assert found.small == pytest.approx(expected, abs=1e-3)
    assert found.large == pytest.approx(expected, abs=1e-3)
    assert found.steepness == pytest.approx(1, abs=1e-3)
    assert found.fault == ("wrong_gradient" if expected > 0.4 else None)


def test_a_parabola_has_no_error_and_a_cube_that_of_its_curvature():
    assert compared(torch.square).large < 1e-3
    found = compared(lambda x: x**3, torch.ones(4, 50))
    # The point lies at up to 1.1, moved by .1 of it: ((p + h)^3 - (p - h)^3) / 2 h = 3 p^2 + h^2.
    assert found.large == pytest.approx(0.01 / 6, rel=0.3)


def test_zeros_in_front_of_a_kink_are_looked_at_beside_it():
    sparse = torch.where(torch.rand(U.shape, generator=torch.Generator().manual_seed(1)) < 0.9, 0.0, U)
    assert compared(torch.relu, sparse).large < 0.3


class Net(nn.Module):
    """A module with a step of its own between two others."""

    def __init__(self, step):
        super().__init__()
        self.first, self.second, self.step = nn.Linear(64, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 3)), step
        self.requires_grad_(False)

    def forward(self, x):
        return self.second(self.step(self.first(x.flatten(1))))


def by_own_function(x):
    return Zero.apply(x) + x.detach().mean() * 0


CUTS = {
    "detach": (torch.detach, "detach", False),
    "data": (lambda x: x.data + 1, "data", False),
    "item": (lambda x: torch.full_like(x, x.sum().item()), "item", False),
    "argmax": (lambda x: nn.functional.one_hot(x.argmax(1), 16).float(), "argmax", False),
    "comparison": (lambda x: (x > 0).float(), "gt", False),
    "no_grad": (torch.no_grad()(lambda x: x * 2), "mul", True),
}


@pytest.mark.parametrize("inside", [False, True], ids=["in the forward", "in a module"])
@pytest.mark.parametrize("name", CUTS)
def test_the_operation_that_cuts_the_graph(name, inside):
    step, operation, off = CUTS[name]
    net = Net(Apply(step) if inside else step)
    x = X[:4].clone().requires_grad_()
    with traced(net, 4) as trace:
        assert not net(x).requires_grad
    cut = trace.cut
    assert (cut.place.call.name, cut.place.operation, cut.graph_off) == ("step" if inside else "", operation, off)


def test_operations_outside_the_path_are_no_cut():
    def step(x):
        scale = x.detach().abs().max()
        assert x.argmax() >= 0
        return x / scale

    net = Net(step)
    with traced(net, 4) as trace:
        out = net(X[:4].clone().requires_grad_())
    assert out.requires_grad
    assert trace.cut is None
    assert {cut.place.operation for cut in trace.cuts} >= {"detach", "argmax"}


@pytest.mark.parametrize(
    ("step", "zero", "operation", "node"),
    [
        (rounded, True, "round", "RoundBackward0"),
        (by_own_function, True, "", "ZeroBackward"),
        (lambda x: (x * 0).sqrt(), False, "sqrt", "SqrtBackward0"),
    ],
    ids=["round", "own function", "square root"],
)
def test_the_node_that_stops_a_gradient(step, zero, operation, node):
    net = Net(Apply(step))
    x = X[:4].clone().requires_grad_()
    with traced(net, 4) as trace:
        net(x).sum().backward()
    found = [one for one in trace.killed if one.zero == zero]
    places = {(one.place.call.name, one.node) for one in found}
    assert places == {("step", node)}
    assert all(bool(one.rows.all()) for one in found)
    assert operation in {one.place.operation for one in found} | {""}


def test_gradient_norms_are_those_of_the_layers():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5, bias=False), nn.Linear(5, 1, bias=False)).requires_grad_(False)
    x = X[:4].clone().requires_grad_()
    with traced(net, 4) as trace:
        net(x).sum().backward()
    found = {call.name: call.gradient for call in trace.calls}
    assert torch.allclose(found["1"].float(), net[2].weight.norm().expand(4))
    assert torch.allclose(found["2"], torch.ones(4, dtype=torch.float64))
    assert torch.allclose(found["0"].float(), (net[2].weight @ net[1].weight).norm().expand(4), rtol=1e-4)
    assert math.isclose(float(x.grad[0].norm()), float(found["0"][0]), rel_tol=1e-4)


@pytest.mark.parametrize(
    ("function", "share"),
    [(rounded, 0.0), (lambda x: Zero.apply(x), 0.0), (lambda x: x * 1e-6, 1e-6), (lambda x: Opposite.apply(x), 1.0)],
)
def test_what_a_layer_passes_on_is_measured_at_its_input(function, share):
    """A layer that stops the gradient has all of it at its output."""
    net = nn.Sequential(Apply(function), nn.Flatten(), nn.Linear(64, 3)).eval()
    layers = {one.name: one for one in probe_model(net, X[:8], Y[:8] % 3, threat_model=LINF, seed=0).layers}
    assert layers
    assert layers["0"].gradient_norm > 0
    assert layers["0"].passed_norm == pytest.approx(share * layers["0"].gradient_norm, rel=1e-3)
    assert layers["2"].passed_norm == pytest.approx(layers["1"].gradient_norm, rel=1e-6)


NEAR = {
    "the identity": torch.clone,
    "quantised": rounded,
    "detached": torch.detach,
    "of the wrong sign backwards": Opposite.apply,
    "steep sigmoids": lambda x: torch.sigmoid(500 * (x - 0.45)),
    "compressed": jpeg,
    "contrast": lambda x: 1.2 * x - 0.1,
    "ReLU": lambda x: (x - 0.1).relu(),
}
FAR = {
    "few winners": lambda x: winners(x - 0.5, 0.05),
    "turned": lambda x: x.flip(-1),
    "mixed": lambda x: x @ torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0))).Q,
    "negated": torch.neg,
    "constant": torch.zeros_like,
}


@pytest.mark.parametrize(("functions", "near"), [(NEAR, True), (FAR, False)], ids=["near", "far"])
def test_what_is_like_the_identity(functions, near):
    for name, function in functions.items():
        found = near_identity(lambda given, h=function: [h(*given)], [X], generator=torch.Generator().manual_seed(0))
        assert (name, found) == (name, near)


@pytest.mark.parametrize(
    ("layer", "smoothed"),
    [
        (lambda x: winners(x, 0.05), True),
        (lambda x: torch.sigmoid(500 * x), False),
        (lambda x: 0.999 * x.detach() + 0.001 * x, False),
    ],
)
def test_the_identity_comes_last_for_what_is_not_like_it(layer, smoothed):
    (found,) = probe_model(inserted(1, Apply(layer)), X, Y, threat_model=LINF).findings
    assert [bool(one.view.get("noise")) for one in found.remedies if one.view] == [smoothed, not smoothed]
