"""Steps and samples against the formulas of docs/theory/linear_region.md, written down plainly for one input."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, kstest

from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.plane_steps import fab_steps, then_trust_region, trust_region_steps
from robust_ext.attacks.linear_region.search import sample_near
from robust_ext.attacks.linear_region.stepping import descent_steps, proximal_steps
from robust_ext.core.random import stream
from robust_ext.core.threat import ThreatModel
from tests.attacks.linear_region.test_attack import predicted, smooth_net
from tests.attacks.problems import images, target_of

STEPS = 14


def sigmoid(t):
    return 1 / (1 + np.exp(-t))


class Plain:
    """One input of a network in float64, and the points at which it is looked at."""

    def __init__(self, network, x, label):
        self.network, self.x, self.label = copy.deepcopy(network).double(), x.double().numpy(), label
        self.seen = []

    def look(self, z):
        """Margin, its gradient, and whether the point is adversarial."""
        self.seen.append(z.copy())
        point = torch.from_numpy(z)[None].requires_grad_()
        logits = self.network(point)[0]
        others = torch.cat([logits[: self.label], logits[self.label + 1 :]])
        margin = others.max() - logits[self.label]
        (gradient,) = torch.autograd.grad(margin, point)
        margin, largest = float(margin.detach()), float(logits.detach().abs().max())
        return margin, gradient[0].numpy(), margin > 2e-6 * (1 + largest)

    def descents(self, norm):
        order = {"linf": np.inf, "l2": 2}[norm]
        u, known = np.zeros_like(self.x), np.inf
        for i in range(STEPS):
            m, g, adversarial = self.look(self.x + u)
            far, falling = np.linalg.norm(u, order), (1 + math.cos(math.pi * i / (STEPS - 1))) / 2
            known = min(known, far) if adversarial else known
            c = 0.001 + ({"linf": 0.1, "l2": 0.3}[norm] - 0.001) * falling
            length = 0.01 + ({"linf": 1.0, "l2": 5.0}[norm] - 0.01) * falling
            if i == 0:
                r = far + (0 if adversarial else abs(m) / np.linalg.norm(g, {"linf": 1, "l2": 2}[norm]))
            else:
                r = (1 - c) * min(r, far) if adversarial else min((1 + c) * r, known)
            u = u + length * r * (np.sign(g) if norm == "linf" else g / np.linalg.norm(g))
            u = np.clip(u, -r, r) if norm == "linf" else u * min(1, r / np.linalg.norm(u))
            u = np.clip(self.x + u, 0, 1) - self.x

    def proximal(self, norm):
        u, h, v = np.zeros_like(self.x), 0, 0
        nu, weight = math.log(100), sigmoid(math.log(100))
        for i in range(STEPS):
            m, g, adversarial = self.look(self.x + u)
            h, v = 0.9 * h + 0.1 * g * sigmoid(-m), 0.999 * v + 0.001 * (g * sigmoid(-m)) ** 2
            scale, length = np.sqrt(v / (1 - 0.999 ** (i + 1))), 0.3 * 0.01 ** (i / STEPS)
            u = np.clip(self.x + u + length * h / (1 - 0.9 ** (i + 1)) / scale, 0, 1) - self.x
            threshold = length * (1 - weight) / weight * np.minimum(1 / scale, 5 / scale.max())
            u = np.sign(u) * np.maximum(0, np.abs(u) - threshold)
            change = 0.01 + 0.09 * (1 - i / STEPS)
            nu = np.clip(nu - change if adversarial else nu + change, -math.log(1e6), math.log(1e6))
            weight = 0.9 * weight + 0.1 * sigmoid(nu)

    def boundary(self, norm):
        z = self.x.copy()
        for i in range(STEPS):
            m, g, _ = self.look(z)
            height = g @ z - m + 0.002 * np.linalg.norm(g) * np.linalg.norm(z - self.x)
            w = 0.5 * 0.1 ** (i / (STEPS - 1))
            z = (1 - w) * self.beyond(z, g, height) + w * self.beyond(self.x, g, height)
        self.seen.append(z)

    @staticmethod
    def beyond(v, g, height):
        """The nearest point of the box to v with g . a >= height, in l2: clip(v + t g), by bisection over t."""
        low, high = 0.0, 1e3
        for _ in range(200 if g @ v < height else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if g @ np.clip(v + middle * g, 0, 1) >= height else (middle, high)
        return np.clip(v + low * g, 0, 1)


def path(take, network, inputs, norm, *, points=None, steps=STEPS):
    """The oracle after steps, all points at which the network was queried, ``(B, D)``, and what the steps returned."""
    target, seen = target_of(network, (8,), 3), []
    oracle = BoundaryOracle(
        target, inputs, predicted(target, inputs), threat_model=ThreatModel(norm=norm, epsilon=0.1), targeted=False
    )
    handle = target.module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()[0].numpy().copy()))
    points = inputs if points is None else points
    ended = take(oracle, points, torch.tensor([0]), steps=steps, going=lambda rows: rows >= 0)
    handle.remove()
    return oracle, np.stack(seen), ended


@pytest.mark.parametrize(
    ("take", "plain", "norm"),
    [
        (descent_steps, Plain.descents, "linf"),
        (descent_steps, Plain.descents, "l2"),
        (proximal_steps, Plain.proximal, "l1"),
        (fab_steps, Plain.boundary, "l2"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_paths_are_those_of_the_formulas(take, plain, norm, seed):
    network, inputs = smooth_net(8, seed=seed), images(1, (8,), seed=seed)
    oracle, seen, _ = path(take, network, inputs, norm)
    expected = Plain(network, inputs[0], int(oracle.labels[0]))
    plain(expected, norm)
    assert len(seen) == len(expected.seen)
    np.testing.assert_allclose(seen, np.stack(expected.seen), atol=1e-4)
    assert np.abs(np.diff(np.stack(expected.seen), axis=0)).max() > 0.01


@pytest.mark.parametrize("norm", ["l2", None])
@pytest.mark.parametrize("seed", range(4))
def test_trust_region_steps_begin_where_steps_in_another_norm_ended(norm, seed):
    network, inputs = smooth_net(8, seed=seed), images(1, (8,), seed=seed)
    both = partial(then_trust_region, first=descent_steps if norm else fab_steps, last=5, norm=norm)
    oracle, seen, _ = path(both, network, inputs, "l1", steps=20)
    other, first, (points, _) = path(both.keywords["first"], network, inputs, norm or "l1", steps=15)
    _, last, _ = path(trust_region_steps, network, inputs, "l1", points=points, steps=5)
    np.testing.assert_array_equal(seen, np.concatenate([first, last]))
    # Points are kept by l1, whatever norm the steps were in, but for those that rounding could decide.
    logits = network(torch.from_numpy(seen)).detach().double().numpy()
    margins = np.delete(logits, int(oracle.labels), axis=1).max(1) - logits[:, int(oracle.labels)]
    distances = np.abs(seen.astype(np.float64) - inputs.double().numpy()).sum(1)
    nearest, sure = (distances[margins > least].min() for least in (0, 1e-4))
    assert nearest - 1e-7 <= float(oracle.nearest[0]) <= sure + 1e-7
    # Each pass is counted once.
    assert int(oracle.passes[0]) == int(other.passes[0]) + 2 * 5 + 1


def test_samples_are_distributed_as_in_equations_12_to_14():
    count, values, q, gamma = 4000, 6, 0.8, 3.0
    inputs, delta = torch.zeros(1, values).double(), torch.tensor([[0.3, -0.2, 0.5, 0.1, -0.4, 0.2]]).double()
    rows, size = (inputs + delta).expand(count, values), float(delta.norm())
    streams = [stream(0, number) for number in range(count)]
    sampled = sample_near(rows, inputs.expand_as(rows), streams, q=q, gamma=gamma, bounds=(-9.0, 9.0))
    moved = (sampled - rows).numpy()
    r, outward = np.linalg.norm(moved, axis=1), (delta / size)[0].numpy()
    assert kstest((r / size) ** (1 / gamma), "uniform").pvalue > 0.01
    inward = -(moved @ outward) / r
    assert binomtest(int((inward > 0).sum()), count, q).pvalue > 0.01
    # X_2 is uniform in [0, pi], so that its sine has the distribution of that of a uniform angle in [0, pi / 2].
    assert kstest(np.arcsin(np.abs(inward).clip(0, 1)) / (np.pi / 2), "uniform").pvalue > 0.01
    across = moved + (inward * r)[:, None] * outward
    directions = across / np.linalg.norm(across, axis=1, keepdims=True)
    isotropic = (np.eye(values) - np.outer(outward, outward)) / (values - 1)
    np.testing.assert_allclose(directions.T @ directions / count, isotropic, atol=0.02)
    np.testing.assert_allclose(directions.mean(0), 0, atol=0.03)
