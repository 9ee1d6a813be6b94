"""Small networks, inputs and targets that tests of attacks share."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.spatial import SpatialTransformation
from robust_ext.attacks.square import Square
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.demo.network import digits_network

_SHORT = {"initial_const": 0.05, "decrease_factor": 0.8}
# LinearRegion needs a piecewise affine network, and is tested beside its solver.
MADE = {
    "APGD": APGD(steps=12, restarts=2),
    "APGD from the input": APGD(steps=8, loss="margin", start="input"),
    "APGD on DLR": APGD(steps=6, loss="dlr", restarts=2),
    "APGD at targets": APGD(steps=6, loss="targeted-dlr", target_classes=2),
    "APGD at margins": APGD(steps=6, loss="targeted-margin", target_classes=2),
    "ObjectivePGD": ObjectivePGD(steps=8),
    "ObjectivePGD KL": ObjectivePGD(objective="kl", algorithm="bim", steps=6, best=True),
    "RandomSearch": RandomSearch(points=25),
    "Square": Square(queries=25, restarts=2),
    "Square on": Square(queries=10, stop_early=False, loss="ce"),
    "RayS": RayS(queries=60),
    "Spatial grid": SpatialTransformation(translation=1, translation_steps=3, rotation_steps=3),
    "Spatial random": SpatialTransformation(translation=1, mode="random", samples=6, loss="margin"),
    "CarliniWagnerLinf": CarliniWagnerLinf(steps=20, learning_rate=0.05, const_factor=8, **_SHORT),
    "FeatureMatching": FeatureMatching(features="2", steps=15, restarts=2),
    "LogitMatching": LogitMatching(steps=15, rel_step_size=0.1, restarts=2, samples=2, level=0.01, check_every=1),
    "OrthogonalPGD": OrthogonalPGD(steps=15, restarts=2),
    "SelectivePGD": SelectivePGD(steps=15, restarts=2),
    "JointLoss": JointLoss(steps=15, restarts=2),
}

in_every_norm = pytest.mark.parametrize(
    ("name", "norm"),
    [pytest.param(name, norm, id=f"{name} {norm}") for name, made in MADE.items() for norm in made.traits.norms],
)


class Rowwise(nn.Module):
    """A small network whose rows are summed one by one, so that a row alone gives the same bits as in a batch."""

    def __init__(self, values, classes=4, bounds=(0.0, 1.0), *, gain=1, centre=0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(gain * torch.randn(16, values, generator=generator) / values**0.5)
        self.last = nn.Parameter(torch.randn(classes, 16, generator=generator))
        self.bounds, self.centre, self.sizes = bounds, centre, []
        self.eval()

    def forward(self, x):
        self.sizes.append(len(x))
        unit = (x.flatten(1) - self.bounds[0]) / (self.bounds[1] - self.bounds[0]) - self.centre
        hidden = (unit[:, None] * self.first).sum(2).sub(0.1).tanh()
        return (hidden[:, None] * self.last).sum(2)


class Lambda(nn.Module):
    """A function of a batch as a network."""

    def __init__(self, function):
        super().__init__()
        self.forward = function
        self.eval()


class Linear(nn.Module):
    """Margin ``weight . x - threshold`` of class 1 over class 0, in double precision; thresholds may be of rows."""

    def __init__(self, weight, threshold=0.0):
        super().__init__()
        self.weight, self.threshold = weight, threshold

    def forward(self, x):
        along = (x.double() * self.weight.double()).flatten(1).sum(1) - self.threshold
        return torch.stack([torch.zeros_like(along), along], 1)


class Recorder(nn.Module):
    """Keeps every batch it is queried with, without gradients."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.batches = inner, []
        self.eval()

    def forward(self, x):
        assert not torch.is_grad_enabled()
        self.batches.append(x.clone())
        return self.inner(x.float())


def images(count, shape, bounds=(0.0, 1.0), seed=1):
    unit = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))
    return (unit * (bounds[1] - bounds[0]) + bounds[0]).clamp(*bounds)


@cache
def right_digits(count):
    """A network, and those of the last digits, with their labels, that it gets right."""
    data = load_digits()
    x = torch.from_numpy(data.images[-count:, None] / 16).float()
    y = torch.from_numpy(data.target[-count:]).long()
    network = digits_network()
    right = predicted(network, x) == y
    return network, x[right], y[right]


def predicted(module, x):
    with torch.no_grad():
        return module(x).argmax(1)


def target_of(module, shape, classes=4, bounds=(0.0, 1.0)):
    counter = PassCounter()
    given = {"bounds": bounds, "classes": classes, "input_shape": shape, "device": torch.device("cpu")}
    return Target(module=Counted(module, counter), counter=counter, **given)


def labels_of(x):
    """How the network that :func:`search` attacks by default classifies inputs."""
    return predicted(Rowwise(x[:1].numel()), x)


def rowwise_problem(*, rows=6, shape=(2, 3, 4), classes=5, bounds=(0.0, 1.0)):
    """A small network as target, with inputs and the labels that it gives them."""
    module, inputs = Rowwise(torch.Size(shape).numel(), classes), images(rows, shape, bounds)
    return target_of(module, shape, classes, bounds), inputs, predicted(module, inputs)


class Found(NamedTuple):
    """The candidates, how many rows went forward and back, and what the attack showed of its steps."""

    out: Tensor
    passes: PassCounter
    steps: list[Any]


def search(attack, x, y, threat_model, *, module=None, classes=4, seed=0, **extras):
    target = target_of(module or Rowwise(x[:1].numel()), tuple(x.shape[1:]), classes, threat_model.bounds)
    generator, steps = torch.Generator().manual_seed(seed), []
    given = {"threat_model": threat_model, "generator": generator, "watch": steps.append, **extras}
    return Found(attack.search(target, x, y, **given), target.counter, steps)


def attacked(attack, problem, *, seed=0, **extras):
    given = {"target": problem.target, "inputs": problem.inputs, "labels": problem.labels, **extras}
    generator = torch.Generator().manual_seed(seed)
    return attack.search(threat_model=problem.threat_model, generator=generator, **given)


def watched(attack, problem, **extras):
    steps = []
    attacked(attack, problem, watch=steps.append, **extras)
    return steps


def affine_network(shape: tuple[int, ...], classes: int, *, bounds: tuple[float, float] = (0.0, 1.0)) -> nn.Module:
    """A random piecewise affine network whose decision boundaries run through the middle of the box, in eval mode."""
    (low, high), values = bounds, torch.Size(shape).numel()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, last = nn.Linear(values, 8), nn.Linear(8, classes)
    with torch.no_grad():
        first.weight.mul_(4 / (high - low))
        first.bias.sub_(first.weight.sum(1) * (low + high) / 2)
        last.bias.sub_(last(first(torch.full((values,), (low + high) / 2)).relu()))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last).eval()
