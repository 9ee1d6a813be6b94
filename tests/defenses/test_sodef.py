import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from robust_ext import BPDA
from robust_ext.core.random import seeded_globals
from robust_ext.datasets.load import load_dataset
from robust_ext.defenses.sodef import SODEF, StableField, StableHead, StableHeadTraining, integrate
from robust_ext.demo.network import digits_network
from robust_ext.models.features import split
from tests.models.cases import data, network

MATRIX = np.array([[-0.3, 1.0, 0.0], [-1.0, -0.2, 0.4], [0.1, 0.0, -0.7]])


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor(MATRIX))

    def forward(self, time, state):
        return state @ self.matrix.T


def defense(dtype=torch.float32, **settings):
    net = network(dtype)
    with seeded_globals(1):
        head = StableHead(8, 3, dimension=4, hidden=8).to(dtype)
    return SODEF(net, net[:3], head, **{"solver": "rk4", **settings})


DOPRI = {"solver": "dopri5", "tolerance": 1e-9}


@pytest.mark.parametrize("settings", [{"solver": "rk4", "steps": 200}, DOPRI, {**DOPRI, "adjoint": False}])
def test_a_linear_equation_ends_where_the_exponential_does(settings):
    if settings["solver"] == "dopri5":
        pytest.importorskip("torchdiffeq")
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    end = integrate(Linear(), start, time=5.0, **settings)
    exponential = torch.tensor(scipy.linalg.expm(5.0 * MATRIX))
    torch.testing.assert_close(end, start.detach() @ exponential.T, rtol=1e-6, atol=1e-7)
    cotangent = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    (gradient,) = torch.autograd.grad(end, start, cotangent)
    torch.testing.assert_close(gradient, cotangent @ exponential, rtol=1e-6, atol=1e-6)


def test_times_are_those_of_the_steps_and_the_order_is_four():
    # Velocity t, so that the state at t is t^2 / 2 later.
    start = torch.zeros(1, 2, dtype=torch.float64)
    end = integrate(lambda time, state: time.expand_as(state), start, time=3.0, solver="rk4", steps=2)
    torch.testing.assert_close(end, torch.full((1, 2), 4.5, dtype=torch.float64))
    start = torch.ones(1, 3, dtype=torch.float64)
    exact = start @ torch.tensor(scipy.linalg.expm(5.0 * MATRIX)).T
    with torch.no_grad():
        errors = [float((integrate(Linear(), start, solver="rk4", steps=n) - exact).norm()) for n in (20, 40)]
    assert 12 < errors[0] / errors[1] < 20


def test_the_field_and_its_jacobian():
    field = StableField(4, hidden=7).double()
    states = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = states.numpy()
    for layer in field.layers:
        values = np.sin(-(values @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()))
    time = torch.zeros((), dtype=torch.float64)
    np.testing.assert_allclose(field(time, states).detach().numpy(), values)
    for state, found in zip(states, field.jacobian(states), strict=True):
        wanted = torch.autograd.functional.jacobian(lambda row: field(time, row[None])[0], state)
        torch.testing.assert_close(found, wanted)


def test_the_parts_follow_one_another():
    model, x = defense(steps=7), data(4)
    trace = model.trace(x)
    start = model.classifier[:3](x) @ model.head.reduce.weight.T + model.head.reduce.bias
    torch.testing.assert_close(trace.state["start"], start)
    end = integrate(model.head.field, start, solver="rk4", steps=7)
    torch.testing.assert_close(trace.state["end"], end)
    torch.testing.assert_close(trace.logits, model.head.readout(end))
    assert torch.equal(trace.final, x)
    assert torch.equal(model(x), trace.logits)
    torch.testing.assert_close(model.with_steps(0)(x), model.head.readout(start))
    torch.testing.assert_close(model(x), torch.cat([model(row[None]) for row in x]))


def test_dopri5_agrees_with_small_steps_within_its_tolerance():
    pytest.importorskip("torchdiffeq")
    exact, x = defense(torch.float64, steps=200), data(6, torch.float64)
    for adjoint in (False, True):
        model = defense(torch.float64, solver="dopri5", adjoint=adjoint)
        torch.testing.assert_close(model(x), exact(x), rtol=0, atol=5e-3)
        torch.testing.assert_close(model(x), torch.cat([model(row[None]) for row in x]), rtol=0, atol=5e-3)
        with torch.no_grad():
            assert torch.equal(model(x), model(x))
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(model(leaf)[:, 0].sum(), leaf)
        (wanted,) = torch.autograd.grad(exact(leaf)[:, 0].sum(), leaf)
        torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)


def test_each_answer_costs_one_pass_and_four_evaluations_a_step():
    model = defense(steps=6)
    calls = {"features": 0, "field": 0}
    model.features.register_forward_hook(lambda *_: calls.update(features=calls["features"] + 1))
    model.head.field.register_forward_hook(lambda *_: calls.update(field=calls["field"] + 1))
    with torch.no_grad():
        model(data(3))
    assert calls == {"features": 1, "field": 24}


def test_gradients_flow_and_leave_none_behind():
    model = defense(torch.float64, steps=3)
    x = data(2, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(model, x)
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    for backward in ("identity", "frozen", "trajectory", "unrolled"):
        (found,) = torch.autograd.grad(BPDA(model, backward=backward)(x).square().sum(), x)
        torch.testing.assert_close(found, plain)


@pytest.fixture(scope="module")
def trained():
    net = digits_network()
    inputs, labels = load_dataset("digits", split="train").take(range(400))
    head = StableHeadTraining(hidden=32, epochs=3, seed=4).fit(net, inputs, labels)
    test, wanted = load_dataset("digits").take(range(60))
    return SODEF(net, split(net, inputs[:2]).features, head, solver="rk4", steps=8), test, wanted


def test_training_makes_a_stable_classifier(trained):
    model, x, labels = trained
    assert float((model(x).argmax(1) == labels).float().mean()) > 0.8
    with seeded_globals(0), torch.no_grad():
        start = model.trace(x[:8]).state["start"]
        # The states are nearer to rest than in an untrained field, and the Jacobian's diagonal is negative there.
        speed = [
            float(field(torch.zeros(()), start).norm()) for field in (model.head.field, StableField(64, hidden=32))
        ]
        diagonal = float(model.head.field.jacobian(start).diagonal(dim1=1, dim2=2).mean())
    assert speed[0] < speed[1]
    assert diagonal < 0
    assert not any(p.requires_grad for p in model.head.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_foolbox_breaks_it(trained):
    foolbox = pytest.importorskip("foolbox")
    model, x, labels = trained
    attack = foolbox.attacks.LinfPGD(steps=10, rel_stepsize=0.2, random_start=False)
    _, found, _ = attack(foolbox.PyTorchModel(model, bounds=(0, 1)), x, labels, epsilons=0.3)
    assert float((model(found).argmax(1) == labels).float().mean()) < 0.1
