"""Whatever is wrong, one clear error or a clearly reported outcome."""

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError, ModelError

L1 = robust_ext.ThreatModel(norm="l1", epsilon=4.0)
QUICK = {"inner_points": 40, "random_inner": 10, "random_corners": 10, "canaries": 0}


def run(network, inputs, threat_model, attack=lambda model, x, y: x, **settings):
    return robust_ext.binarization_test(network, attack, inputs, threat_model, **{**QUICK, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": [[0.0]]}, r"inputs: got list, expected a torch.Tensor"),
        ({"inputs": torch.zeros(0, 1, 8, 8)}, r"inputs: got no samples"),
        ({"inputs": torch.full((2, 1, 8, 8), 1.5)}, r"inputs: got values in \[1.5, 1.5\], expected .* in .* \[0, 1\]"),
        ({"kappa": 1.0}, r"kappa: got 1.0, expected a finite number in \[0, 1\)"),
        ({"kappa": "0.9"}, "kappa"),
        ({"inner_points": 0}, "inner_points: got 0"),
        ({"inner_points": 3.5}, "inner_points: got 3.5"),
        ({"boundary_points": True}, "boundary_points: got True"),
        ({"boundary": "edge"}, "boundary: got 'edge', expected one of 'auto', 'corners', 'surface'"),
        ({"readout": "svm"}, "readout"),
        ({"gap": 1.0}, "gap"),
        ({"seed": -1}, "seed"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": "big"}, "batch_size"),
        ({"threshold": 0.0}, "threshold"),
        ({"random_inner": 0, "random_corners": 0}, "random_inner"),
        ({"inner_point": 5}, "inner_point: got an unknown setting, expected .* did you mean inner_points"),
        ({"sample_ids": [1, 1]}, "sample_ids: got an id twice"),
        ({"sample_ids": [1]}, "sample_ids: got 1 ids"),
        ({"calibrate_on": -1}, "calibrate_on"),
    ],
)
def test_arguments(settings, message, network, digits, linf):
    with pytest.raises(InvalidArgumentError, match=message):
        run(network, threat_model=linf, **{"inputs": digits[:2], **settings})


class Broken(nn.Module):
    """A network with one thing wrong."""

    def __init__(self, change):
        super().__init__()
        self.change, self.body, self.head = change, nn.Linear(64, 16), nn.Linear(16, 3)
        self.eval()

    def forward(self, x):
        return self.change(self.head(self.body(x.flatten(1)).relu()))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda z: z.softmax(1), ModelError, "returns probabilities .* leave out the softmax"),
        (lambda z: z[:, :1] - 50, ModelError, "returned one output for each input"),
        (lambda z: z[:1], ModelError, r"returned shape \(1, 3\)"),
        (lambda z: z.argmax(1), ModelError, "returned dtype torch.int64"),
        (lambda z: [z, -z], ModelError, "returned a list with "),
        (lambda z: z * torch.nan, ModelError, "NaN or infinite"),
        (lambda z: z / 0, ModelError, "NaN or infinite"),
    ],
)
def test_models(change, error, message, digits, linf):
    with pytest.raises(error, match=message):
        run(Broken(change), digits[:2], linf)


def raising(model, x, y):
    return 1 / 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"network": 3}, InvalidArgumentError, "model: got int"),
        ({"attack": 3}, InvalidArgumentError, "attacks: got int"),
        ({"attack": []}, InvalidArgumentError, "at least one attack"),
        ({"inputs": torch.rand(2, 3, 5, 5)}, ModelError, "inputs of shape"),
        ({"network": Broken(lambda z: z).train()}, ModelError, r"train mode.*call model.eval\(\)"),
        ({"attack": lambda model, x, y: x[:1]}, AttackError, r"returned shape \(1, 1, 8, 8\)"),
        ({"attack": raising}, AttackError, "raised ZeroDivisionError"),
        ({"attack": "foolbox:LinfPGD", "threat_model": L1}, AttackRefusedError, "not for l1"),
    ],
)
def test_what_does_not_fit(arguments, error, message, network, digits, linf):
    with pytest.raises(error, match=message):
        run(**{"network": network, "inputs": digits[:2], "threat_model": linf, **arguments})


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda x: x * torch.nan, "not_finite"),
        (lambda x: x + torch.inf, "not_finite"),
        (lambda x: x + 2, "out_of_bounds"),
        (lambda x: 1 - x, "beyond_epsilon"),
        (lambda x: x, "not_adversarial"),
    ],
)
def test_useless_candidates_are_outcomes(change, outcome, network, digits, linf):
    result = run(network, digits[:12], linf, attack=lambda model, x, y: change(x))
    (attack,) = result.attacks.values()
    assert (attack["outcomes"][outcome], attack["score"], attack["verdict"]) == (12, 0.0, "failed")


def test_an_attack_leaves_no_trace(digits, linf):
    """Switching batch normalisation to train mode, asking for weights' gradients: judged and left as before."""
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    seen = []

    def vandal(model, x, y):
        model.train()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model(x).sum().backward()
        seen.append(next(one for one in model.modules() if isinstance(one, nn.BatchNorm2d)).running_mean.clone())
        return x

    run(network, digits[:4], linf, attack=vandal)
    assert not torch.equal(seen[0], before["1.running_mean"])
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(part.training for part in network.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())


def test_nothing_separable_is_inconclusive(linf):
    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones(len(x), 3)

    result = run((Constant().eval(), nn.Linear(3, 2).eval()), torch.rand(4, 1, 4, 4), linf)
    (attack,) = result.attacks.values()
    assert (attack["not_separable"], attack["samples"], attack["score"]) == (4, 0, None)
    assert attack["verdict"] == "inconclusive"
    assert "No example could be planted" in str(result)
