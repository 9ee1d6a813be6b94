"""Points measured through a folded copy: the same features, or the network itself; and without waiting for a GPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import robust_ext
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization.forward import Forward, choose_forward, folded_twin
from robust_ext.evaluations.binarization.posing import random_reach
from robust_ext.evaluations.binarization.problems import fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import LayerInput, split


class Residual(nn.Module):
    """Functional calls, a skip and batch normalisation with statistics of its own."""

    def __init__(self, width=32, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
            self.second, self.other = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
            self.head = nn.Linear(width, 4)
            with torch.no_grad():
                for norm in (self.norm, self.other):
                    norm.running_mean.normal_()
                    norm.running_var.uniform_(0.5, 2)
                    norm.weight.uniform_(0.5, 2)
        self.eval()

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.other(self.second(x)) + x)
        return self.head(x.mean((2, 3)))


class DataDependent(Residual):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class Noisy(Residual):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


def counted(network):
    return Counted(LayerInput(network, "head"), PassCounter())


def test_the_copy_gives_the_same_features_and_is_counted():
    network = Residual()
    features = counted(network)
    inputs = torch.rand(5, 3, 10, 10)
    twin = folded_twin(features, inputs)
    before = features.counter.snapshot()
    got = Forward(twin.module, 2, twin.channels_last)(inputs)
    assert features.counter.since(before) == PassCounter(5, 0)
    assert torch.allclose(got, features(inputs), rtol=1e-5, atol=1e-5)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in twin.module.modules())
    assert sum(isinstance(part, nn.BatchNorm2d) for part in network.modules()) == 2


@pytest.mark.parametrize("network", [DataDependent(), Noisy()], ids=lambda n: type(n).__name__)
def test_what_cannot_be_folded_is_measured_as_it_is(network):
    features = counted(network)
    assert folded_twin(features, torch.rand(2, 3, 10, 10)) is None
    forward = choose_forward(features, torch.rand(2, 3, 10, 10), rows=16, fold=True)
    assert (forward.module, forward.rows, forward.channels_last) == (features, 16, False)


def test_shared_layers_are_not_folded():
    """One convolution called twice, once before a normalisation: folding it would change the other call."""

    class Shared(Residual):
        def forward(self, x):
            x = self.norm(self.second(F.relu(self.first(x))))
            return self.head(F.relu(self.second(x)).mean((2, 3)))

    features, inputs = counted(Shared().eval()), torch.rand(3, 3, 10, 10)
    twin = folded_twin(features, inputs)
    assert twin is None or torch.allclose(twin.batch(inputs), features(inputs), rtol=1e-5, atol=1e-5)
    assert sum(isinstance(part, nn.BatchNorm2d) for part in twin.module.modules()) == 1


def test_what_others_read_is_not_written_over():
    """Nor the inputs, and what dropout passes on as it is."""

    class Branching(Residual):
        def forward(self, x):
            y = self.norm(self.first(F.relu(F.dropout(x - 0.5, training=False))))
            z = self.second(F.relu(y))
            return self.head((F.relu(z) * z + F.relu(y + z) + y).mean((2, 3)))

    features, inputs = counted(Branching().eval()), torch.rand(3, 3, 10, 10)
    kept, twin = inputs.clone(), folded_twin(features, inputs)
    assert torch.allclose(twin.batch(inputs), features(inputs), rtol=1e-5, atol=1e-5)
    assert torch.equal(inputs, kept)
    targets = [node.target for node in twin.module.module.model.graph.nodes]
    assert (targets.count(torch.relu_), targets.count(F.relu)) == (1, 3)


def test_results_do_not_depend_on_folding(linf, pgd):
    network, inputs = Residual(), torch.rand(12, 3, 10, 10, generator=torch.Generator().manual_seed(1))
    settings, found = {"forward_batch": 64, "inner_points": 50}, []
    for fold in (True, False):
        result = robust_ext.binarization_test(network, pgd(), inputs, linf, fold=fold, **settings)
        found.append([(r["separable"], r["random_draws"], r["attacks"]) for r in result.records])
    for folded, plain in zip(*found, strict=True):
        assert folded[:2] == plain[:2]
        if plain[0]:
            assert folded[2]["attack"]["outcome"] == plain[2]["attack"]["outcome"]


LINF = ThreatModel(norm="linf", epsilon=0.1)


class Reads(TorchFunctionMode):
    """How often a value is read inside: on a GPU, each waits for it."""

    NAMES = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        masked = name in ("__getitem__", "__setitem__") and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool
            for one in (args[1] if isinstance(args[1], tuple) else args[1:2])
        )
        self.count += name in self.NAMES or masked
        return func(*args, **(kwargs or {}))


def test_search_waits_once_a_round_and_fitting_for_all_problems_at_once(network, digits):
    settings = BinarizationSettings(threat_model=LINF, inner_points=40, random_inner=60, random_corners=60)
    parts, counts = split(network, digits[:2]), []
    for samples in (4, 16):
        forward = Forward(parts.features, 256)
        with Reads() as measuring:
            measured = measure(forward, digits[:samples], range(samples), settings)
        with Reads() as fitting:
            problems = fit(measured, parts.readout, settings)
        with Reads() as searching:
            # No position can be reached, so every point is drawn, in three rounds.
            random_reach(forward, [problems], [float("inf")], settings)
        assert searching.count == 4
        counts.append((measuring.count, fitting.count))
    (measuring, fitting), (of_many, more) = counts
    assert measuring == of_many
    assert more < 1.5 * fitting
