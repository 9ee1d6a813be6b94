"""PCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe
from robust_ext.casestudies.networks import small_features
from robust_ext.core.threat import ThreatModel
from robust_ext.defenses.training.loop import train_network


class PrototypeNetwork(nn.Module):
    def __init__(self, shape, classes, *, features=64, wide=256):
        super().__init__()
        self.features = small_features(shape, features)
        self.widen = nn.Linear(features, wide)
        self.head = nn.Linear(wide, classes)
        self.centres = nn.ParameterList([nn.Parameter(torch.randn(classes, features)), nn.Parameter(torch.randn(classes, wide))])

    def forward(self, x):
        return self.head(self.widen(self.features(x)))


def conformity(features: Tensor, centres: Tensor, labels: Tensor, push: float = 1e-4) -> Tensor:
    apart = (centres[:, None] - centres).square().sum(2)
    count = len(centres)
    others = apart[labels].sum(1) / (count - 1)
    return ((features - centres[labels]).square().sum(1) - push * others).mean()


class PrototypeConformity(CaseStudy):
    title = "Prototype conformity loss"
    source = "Mustafa et al., ICCV 2019"
    published = Published()
    causes = ("saturated_loss",)
    notes = "Notes"

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        return PrototypeNetwork(shape, classes)

    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        def loss(rows: Tensor) -> Tensor:
            x, y = inputs[rows], labels[rows]
            z = module.features(x)
            h = module.widen(z)
            out = nn.functional.cross_entropy(module.head(h), y)
            for f, c in zip((z, h), module.centres):
                out = out + weight * conformity(f, c, y)
            return out
        weight = 0.0
        train_network(module, len(inputs), loss, epochs=10, batch_size=64, learning_rate=2e-3, seed=seed)
        with torch.no_grad():
            z = module.features(inputs)
            h = module.widen(z)
            for f, c in zip((z, h), module.centres):
                for k in range(len(c)):
                    c[k] = f[labels == k].mean(0)
        weight = 0.1
        train_network(module, len(inputs), loss, epochs=10, batch_size=64, learning_rate=2e-3, seed=seed + 1)

    def measure(self, module, inputs, labels, threat_model, *, seed):
        x = inputs.clone().requires_grad_(True)
        with torch.enable_grad():
            logits = module(x)
            (g,) = torch.autograd.grad(cross_entropy(logits, labels).sum(), x)
        t = logits.detach().topk(2).values
        values = {"zero": float((g.flatten(1) == 0).all(1).float().mean()), "margin": float((t[:, 0] - t[:, 1]).median())}
        return Measurement(values=values, present=True, words="x")

    def parts(self, module):
        return (module.features, nn.Sequential(module.widen, module.head).eval())

    def weak(self, threat_model: ThreatModel) -> Recipe:
        return Recipe(attack="robust_ext:ObjectivePGD(steps=10, rel_step_size=0.25, start='input')", words="")

    def right(self, threat_model: ThreatModel) -> Recipe:
        return Recipe(attack="robust_ext:APGD(steps=100, loss='margin')", words="")
