"""Attacks that raise, on a healthy model: the diagnosis states what was raised, and blames nothing else.

Some run on a model and not on planted problems, which have two classes.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import robust_ext
from robust_ext import AttackError, ThreatModel
from robust_ext.demo.network import digits_network
from tests.evaluations.diagnosis.traces import LINF as DIGITS
from tests.evaluations.diagnosis.zoo.networks import digits

X = torch.rand(16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
LINF = ThreatModel(norm="linf", epsilon=0.05)
torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
Y = NETWORK(X).argmax(1)


def wanted(model, x):
    return model(x.clone().requires_grad_())


def key(model, x, y):
    return wanted(model, x) * {}["steps"]


def graph_twice(model, x, y):
    x = x.clone().requires_grad_()
    loss = model(x).pow(2).sum()
    return torch.autograd.grad(loss, x)[0] + torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize(
    ("attack", "raised"), [(key, "KeyError: 'steps'"), (graph_twice, "backward through the graph a second time")]
)
def test_what_was_raised_is_the_cause(attack, raised):
    result = robust_ext.diagnose(NETWORK, attack, X, Y, LINF, references=False, planted=0)
    assert [one["code"] for one in result.content["findings"]] == ["crashed"]
    assert raised in result.likely.cause
    assert "graph (detach" not in str(result)
    with pytest.raises(AttackError) as error:
        robust_ext.binarization_test(NETWORK, attack, X, LINF, inner_points=50)
    assert "cuts the graph" not in str(error.value)


def climbing(loss, *, sign=1):
    def attack(model, x, y, *, epsilon):
        points = x
        for _ in range(10):
            points = points.detach().requires_grad_()
            slope = torch.autograd.grad(loss(model(points), y), points)[0]
            points = (x + (points + sign * epsilon / 4 * slope.sign() - x).clamp(-epsilon, epsilon)).clamp(0, 1)
        return points.detach()

    return attack


def label(z, y):
    return z.gather(1, y[:, None]).sum()


def listed(model, x, y, *, epsilon):
    """A class at a time, by names that only ten classes have."""
    names = dict(enumerate("abcdefghij"))
    model(x)
    return x + 0 * torch.tensor([ord(names[9 - int(one)]) for one in y]).view(-1, 1, 1, 1) * model(x)[0, 7]


FAULTS = {
    "targets of its own": (climbing(lambda z, y: -cross_entropy(z, (y + 5) % 10, reduction="sum")), "IndexError"),
    "a target": (climbing(lambda z, y: (z[:, 3]).sum() - label(z, y)), "IndexError"),
    "one-hot of ten": (climbing(lambda z, y: ((1 - one_hot(y, 10)) * z).sum()), "RuntimeError"),
    "the third of the logits": (climbing(lambda z, y: z.topk(3, 1).values[:, 2].sum() - label(z, y)), "out of range"),
    "names of ten": (listed, "IndexError"),
}
SOUND = {
    "cross-entropy": climbing(lambda z, y: cross_entropy(z, y, reduction="sum")),
    "targets among the classes": climbing(
        lambda z, y: cross_entropy(z, (y + 1) % z.shape[1], reduction="sum"), sign=-1
    ),
}


def diagnosed(attack):
    inputs, labels = (part[:6] for part in digits())
    return robust_ext.diagnose(
        digits_network(), attack, inputs, labels, DIGITS, planted=4, inner_points=60, references=False
    )


@pytest.mark.parametrize("name", FAULTS)
def test_the_samples_are_shown_and_judged_beside_what_it_raised_on_planted_problems(name):
    function, error = FAULTS[name]
    result = diagnosed(function)
    (attack,) = result.content["attacks"]
    assert attack["robust_accuracy"] is not None
    assert attack["error"] is None
    assert attack["score"] is None
    (raised,) = (one for one in result.findings if one.code == "crashed_planted")
    assert error in raised.evidence[0]
    assert "10" in raised.cause  # With ten classes, of which eight are empty, it runs.
    assert "crashed" not in {one.code for one in result.findings}


@pytest.mark.parametrize("name", SOUND)
def test_attacks_that_take_what_is_there_run_on_both(name):
    result = diagnosed(SOUND[name])
    assert result.content["attacks"][0]["score"] is not None
    assert "crashed_planted" not in {one.code for one in result.findings}
