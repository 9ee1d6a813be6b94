"""Attacks that raise, on a healthy model: the diagnosis states what was raised, and blames nothing else."""

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import AttackError, ThreatModel

X = torch.rand(16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
LINF = ThreatModel(norm="linf", epsilon=0.05)
torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
Y = NETWORK(X).argmax(1)


def wanted(model, x):
    return model(x.clone().requires_grad_())


def key(model, x, y):
    return wanted(model, x) * {}["steps"]


def shape(model, x, y):
    z = wanted(model, x)
    return z @ z


def attribute(model, x, y):
    wanted(model, x)
    return model.step_size


def assertion(model, x, y):
    assert wanted(model, x).shape[1] == 1000, "1000 classes"


def graph_twice(model, x, y):
    x = x.clone().requires_grad_()
    loss = model(x).pow(2).sum()
    return torch.autograd.grad(loss, x)[0] + torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize(
    ("attack", "raised"),
    [
        (key, "KeyError: 'steps'"),
        (shape, "cannot be multiplied"),
        (attribute, "step_size"),
        (assertion, "1000 classes"),
        (graph_twice, "backward through the graph a second time"),
    ],
)
def test_what_was_raised_is_the_cause(attack, raised):
    result = robust_ext.diagnose(NETWORK, attack, X, Y, LINF, references=False, planted=0)
    assert [one["code"] for one in result.content["findings"]] == ["crashed"]
    assert raised in result.likely.cause
    assert "graph (detach" not in str(result)
    with pytest.raises(AttackError) as error:
        robust_ext.binarization_test(NETWORK, attack, X, LINF, inner_points=50)
    assert "cuts the graph" not in str(error.value)
