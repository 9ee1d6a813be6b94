"""Feature scattering."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe
from robust_ext.casestudies.networks import small_features
from robust_ext.core.threat import ThreatModel
from robust_ext.defenses.training.loop import train_network

_ENTROPY = 0.01
_ITERATIONS = 50
_SHARE_OF_LABEL = 0.5


def cosine_costs(a: Tensor, b: Tensor) -> Tensor:
    """1 - cosine of each pair."""
    return 1 - nn.functional.normalize(a, dim=1) @ nn.functional.normalize(b, dim=1).mT


def sinkhorn_cost(costs: Tensor, *, entropy: float = _ENTROPY, iterations: int = _ITERATIONS) -> Tensor:
    """<T, C>."""
    with torch.no_grad():
        count, others = costs.shape
        kernel = -costs / entropy
        u, v = kernel.new_zeros(count), kernel.new_zeros(others)
        a, b = -torch.tensor(float(count)).log(), -torch.tensor(float(others)).log()
        for _ in range(iterations):
            u = a - torch.logsumexp(kernel + v, 1)
            v = b - torch.logsumexp(kernel + u[:, None], 0)
        plan = (kernel + u[:, None] + v).exp()
    return (plan * costs).sum()


class FeatureScattering(CaseStudy):
    title = "Feature scattering"
    source = "Zhang and Wang, NeurIPS 2019"
    published = Published(clean=0.8998, claimed=0.606, true=0.3878, weak_score=">= .95", right_score=">= .95", flagged=False, source="")
    causes = ("falls_behind", "short_path")
    notes = "Notes"

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        return nn.Sequential(small_features(shape, 64), nn.Linear(64, classes))

    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        epsilon = 0.1
        classes = int(labels.max()) + 1
        targets = torch.full((len(labels), classes), (1 - _SHARE_OF_LABEL) / (classes - 1)).scatter_(1, labels[:, None], _SHARE_OF_LABEL)

        def loss(rows: Tensor) -> Tensor:
            x = inputs[rows]
            points = (x + epsilon * (2 * torch.rand_like(x) - 1)).clamp(0, 1).requires_grad_(True)
            with torch.no_grad():
                clean = module(x)
            (gradient,) = torch.autograd.grad(sinkhorn_cost(cosine_costs(clean, module(points))), points)
            points = (points + epsilon * gradient.sign()).detach()
            points = torch.clamp(points, x - epsilon, x + epsilon).clamp(0, 1)
            return nn.functional.cross_entropy(module(points), targets[rows])

        train_network(module, len(inputs), loss, epochs=30 if len(inputs) < 3000 else 8, batch_size=60, learning_rate=2e-3, seed=seed)

    def measure(self, module, inputs, labels, threat_model, *, seed):
        with torch.no_grad():
            p = module(inputs).softmax(1).amax(1)
        return Measurement(values={"median largest probability": float(p.median())}, present=True, words="x")

    def weak(self, threat_model: ThreatModel) -> Recipe:
        return Recipe(attack="robust_ext:ObjectivePGD(steps=20, rel_step_size=0.25)", words="")

    def right(self, threat_model: ThreatModel) -> Recipe:
        return Recipe(attack="robust_ext:APGD(steps=200, loss='margin')", words="")
