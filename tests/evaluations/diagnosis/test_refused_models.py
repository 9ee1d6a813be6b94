"""Models that are refused, and models that take gradients while they run: only what was tried is stated."""

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import ModelError, ThreatModel
from tests.evaluations.diagnosis.models import rounded

X = torch.rand(16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
LINF = ThreatModel(norm="linf", epsilon=0.05)
torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
Y = NETWORK(X).argmax(1)
ATTACK = "robust_ext:APGD(steps=5)"


class Does(nn.Module):
    """A network behind a function of the inputs."""

    def __init__(self, function):
        super().__init__()
        self.network, self.function = NETWORK, function
        self.eval()

    def forward(self, x):
        return self.function(self.network, x)


def of_size(*sizes):
    def run(network, x):
        if len(x) not in sizes:
            raise RuntimeError(f"got {len(x)} rows")
        return network(x)

    return run


def divides(network, x):
    if bool((x == 1).flatten(1).all(1).any()):
        raise ZeroDivisionError("saturated image")
    return network(x)


def misses(network, x):
    raise KeyError("mask")


def squeezes(network, x):
    return network(x).squeeze()


REFUSED = {
    # What the cause names, and whether batches of other sizes are blamed
    "any": (misses, "raises on 4 inputs", False),
    "fixed batch": (of_size(16, 4), "on a single row", True),
    "fixed batch of all": (of_size(16), "raises on 4 inputs", True),
    "squeeze": (squeezes, "no row of logits for each input on a single row", True),
    "a bound": (divides, "where the other rows lie at a bound", False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_model_does_not_take_is_what_was_tried(name):
    function, words, sizes = REFUSED[name]
    result = robust_ext.diagnose(Does(function), ATTACK, X, Y, LINF)
    (finding,) = result.content["findings"]
    assert finding["code"] == "crashed"
    assert words in finding["cause"]
    assert ("any size" in finding["remedies"][0]["words"]) == sizes
    assert result.content["not_run"]


def test_where_the_mode_is_refused_gradients_are_not_talked_about():
    model = nn.Sequential(nn.Dropout(0.5), Does(lambda network, x: network((x * 8).round() / 8)))
    result = robust_ext.diagnose(model.train(), ATTACK, X, Y, LINF)
    assert {one["code"] for one in result.content["findings"]} == {"train_mode"}


def optimised(network, x, *, take="grad", on=True, keep=False):
    """Inputs moved down a loss of the network's own."""
    moved = x
    with torch.set_grad_enabled(on or torch.is_grad_enabled()):
        for _ in range(2):
            leaf = moved.detach().requires_grad_()
            energy = network(leaf).square().sum()
            if take == "grad":
                (gradient,) = torch.autograd.grad(energy, leaf)
            else:
                energy.backward()
                gradient = leaf.grad
            moved = moved.detach() - 0.01 * gradient
    return x + (moved - x).detach() if keep else moved.detach()


OWN = {
    "grad": {},
    "backward": {"take": "backward"},
    "grad without enable_grad": {"on": False},
    "backward without enable_grad": {"take": "backward", "on": False},
}


@pytest.mark.parametrize("name", OWN)
def test_a_model_that_takes_gradients_while_it_runs_is_pointed_to_the_evaluation_of_defenses(name):
    model = Does(lambda network, x: network(optimised(network, x, **OWN[name])))
    result = robust_ext.diagnose(model, ATTACK, X, Y, LINF, references=False, planted=0)
    first = result.content["findings"][0]
    names = {"model": model, "inputs": X[:4], "labels": Y[:4], "threat_model": LINF, "static_model": NETWORK}
    code = first["remedies"][0]["paste"].replace("None, inputs", "'robust_ext:RandomSearch(points=20)', inputs")
    exec(code, names)  # noqa: S102
    assert names["result"].content["kind"] == "test_time"
    if OWN[name].get("on") is False:
        with pytest.raises(ModelError, match="evaluate_defense"):
            robust_ext.robust_accuracy(model, ATTACK, X, Y, LINF)


def _noisy(x):
    return x + 0.05 * torch.randn_like(x)


@pytest.mark.parametrize(
    ("front", "codes"),
    [
        (lambda x: rounded(_noisy(x)), ["zero_gradient", "random_output"]),
        (lambda x: _noisy(rounded(x)), ["zero_gradient", "random_output"]),
        (lambda x: _noisy(x).detach(), ["cut_gradient", "random_output"]),
        (lambda x: (_noisy(x) > 0.5).float(), ["cut_gradient", "random_output"]),
        (_noisy, ["random_output"]),
        (lambda x: torch.sigmoid(500 * (_noisy(x) - 0.45)), ["random_output"]),
    ],
)
def test_gradients_that_are_none_come_before_randomness_as_their_mean_is_none(front, codes):
    result = robust_ext.diagnose(Does(lambda network, x: network(front(x))), ATTACK, X, Y, LINF, references=False)
    assert [one.code for one in result.findings if one.weight != "low"] == codes
