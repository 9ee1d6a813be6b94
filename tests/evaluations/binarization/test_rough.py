"""Points measured in lower precision: what is planted holds in the network's own, or is measured again in float32."""

import pytest
import torch
from torch import nn

from robust_ext import binarization_test, plant
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization.cost import planting_cost
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.points import draw_inner
from robust_ext.evaluations.binarization.rough import RECHECKED, fit_problems
from robust_ext.evaluations.binarization.settings import BinarizationSettings

LINF = ThreatModel(norm="linf", epsilon=0.1)


class Coarse(nn.Module):
    """A network whose features are far from 0, so that few bits are left for what tells points apart."""

    def __init__(self, network, offset):
        super().__init__()
        self.body, self.head, self.offset, self.types = network[:-1], network[-1], offset, []
        self.eval()

    def features(self, x):
        found = self.body(x)
        self.types.append(found.dtype)
        return found + self.offset

    def forward(self, x):
        return self.head(self.features(x))


class Rigid(Coarse):
    """One that autocast breaks."""

    def features(self, x):
        return torch.empty(len(x), 128).index_copy_(1, torch.arange(128), self.body(x))


class Part(nn.Module):
    """The features of one of these."""

    def __init__(self, network):
        super().__init__()
        self.network, self.training = network, False

    def forward(self, x):
        return self.network.features(x)


def problems_of(network, inputs, **settings):
    made = BinarizationSettings(threat_model=LINF, inner_points=60, seed=0, **settings)
    features = Counted(Part(network), PassCounter())
    return fit_problems(Forward(features, 64), network.head, inputs, range(len(inputs)), made), features.counter, made


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("readout", ["logistic", "nearest"])
def test_what_is_planted_holds_in_the_networks_own_precision(network, digits, precision, readout):
    planted = plant(network, digits[:8], LINF, inner_points=150, planting_precision=precision, readout=readout, seed=0)
    assert len(planted) == 8
    assert planted.score(planted.planted[:, 0]) == 1
    assert planted.score(planted.inputs) == 0
    inner = draw_inner(planted.inputs, planted.samples, planted.settings, 150)
    module = planted.judge
    with torch.no_grad():
        assert not any(bool((module(points).argmax(1) == 1).any()) for points in inner.unbind(1))


def test_few_points_are_measured_again_where_rounding_does_not_matter(network, digits):
    plain, exact, settings = problems_of(Coarse(network, 0.0), digits[:6])
    coarse = Coarse(network, 0.0)
    problems, counter, settings = problems_of(coarse, digits[:6], planting_precision="bfloat16")
    assert set(coarse.types) == {torch.bfloat16, torch.float32}
    assert counter.forward == exact.forward + 6 * (RECHECKED + 2)
    assert planting_cost(settings).forward == counter.forward / 6
    # The boundary lies where float32 has it, up to what the direction was fitted to.
    assert torch.allclose(problems.gap, plain.gap, rtol=0.05)
    assert not torch.equal(problems.gap, plain.gap)


@pytest.mark.parametrize("network_of", [lambda body: Coarse(body, 3e4), lambda body: Rigid(body, 0.0)])
def test_where_rounding_matters_all_is_measured_again(network, digits, network_of):
    """And where the network does not run in lower precision."""
    plain, _, _ = problems_of(network_of(network), digits[:6])
    problems, _, _ = problems_of(network_of(network), digits[:6], planting_precision="bfloat16")
    assert problems.samples == plain.samples
    for name in ("planted", "gap", "edge", "logit_low"):
        assert torch.equal(getattr(problems, name), getattr(plain, name))


def test_only_samples_that_need_it_are_measured_again(network, digits):
    """Features are far from 0 around every other sample."""

    class Mixed(Coarse):
        def features(self, x):
            nearest = torch.cdist(x.float().flatten(1), digits[:6].flatten(1)).argmin(1, keepdim=True)
            found = self.body(x)
            # In the precision of the features: a sum with float32 would keep every bit of them.
            return found + torch.where(nearest % 2 == 1, 3e4, 0.0).to(found.dtype)

    plain, exact, _ = problems_of(Mixed(network, 0.0), digits[:6])
    problems, counter, _ = problems_of(Mixed(network, 0.0), digits[:6], planting_precision="bfloat16")
    assert problems.samples == tuple(range(6))
    assert counter.forward == exact.forward + 6 * (RECHECKED + 2) + 3 * exact.forward / 6
    # Those are as float32 has them, up to rounding in batches of another size.
    assert torch.allclose(problems.gap[1::2], plain.gap[1::2], rtol=0.01)
    assert torch.allclose(problems.planted[1::2], plain.planted[1::2])
    assert not torch.isclose(problems.gap[::2], plain.gap[::2], rtol=1e-5).all()


def test_verdicts_are_those_of_float32(network, digits, pgd):
    attacks = {"climbing": pgd(), "one small step": lambda model, x, y: (x + 0.001).clamp(0, 1)}
    scores = []
    for precision in ("float32", "bfloat16"):
        settings = {"inner_points": 60, "depths": (1,), "seed": 0, "planting_precision": precision}
        content = binarization_test(network, attacks, digits[:8], LINF, **settings).content
        scores.append([(entry["name"], entry["score"], entry["verdict"]) for entry in content["attacks"]])
    assert scores[0] == scores[1]
