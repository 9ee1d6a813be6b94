"""k-winners-take-all: of each layer's activations only the largest stay, so that gradients hold only infinitesimally.

Source: Xiao, Zhong and Zheng, "Enhancing Adversarial Defense by k-Winners-Take-All" (2020), section 3; Tramer, Carlini,
Brendel and Madry, "On Adaptive Attacks to Adversarial Example Defenses" (2020), section 5, for what breaks it;
Zimmermann et al. 2022, appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.attacks.adapted import adapted_text
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe
from robust_ext.casestudies.networks import small_features
from robust_ext.core.random import stream
from robust_ext.core.threat import ThreatModel
from robust_ext.defenses.training.loop import train_network

SHARE = 0.1


class Winners(nn.Module):
    """The largest tenth of each row's activations, over its whole volume; the others are zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Of activations ``(N, ...)``, in their shape; of equal ones at the limit all stay."""
        flat = x.flatten(1)
        least = flat.topk(max(round(SHARE * flat.shape[1]), 1), 1).values[:, -1:]
        return (flat * (flat >= least)).view_as(x)


class KWinners(CaseStudy):
    title = "k-winners-take-all"
    source = "Xiao, Zhong and Zheng, ICLR 2020"
    published = Published(
        clean=0.7928,
        claimed=0.524,
        true=0.1799,
        weak_score="< .95",
        right_score=">= .95",
        source="adversarially trained, by AutoAttack (fra31/auto-attack, early README)",
    )
    causes = ("wrong_gradient", "gradient_free_wins", "short_path")
    notes = "Notes"

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        """See :meth:`CaseStudy.build`; the first activation stays a ReLU, as the authors' stem does."""
        features = small_features(shape, 128, activation=Winners)
        features[1] = nn.ReLU()
        return nn.Sequential(features, nn.Linear(128, classes))

    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """Train it by the cross-entropy, as Zimmermann et al. did, without adversarial examples."""

        def loss(rows: Tensor) -> Tensor:
            return nn.functional.cross_entropy(module(inputs[rows]), labels[rows])

        train_network(module, len(inputs), loss, epochs=10, batch_size=64, learning_rate=2e-3, seed=seed)

    def measure(
        self, module: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
    ) -> Measurement:
        near = threat_model.epsilon / 20
        noise = torch.stack([torch.rand(row.shape, generator=stream(seed, i, "near")) for i, row in enumerate(inputs)])
        there = inputs + near * (2 * noise - 1)
        grads, sets = [], []
        for x in (inputs, there):
            points = x.clone().requires_grad_(True)
            with torch.enable_grad():
                (g,) = torch.autograd.grad(cross_entropy(module(points), labels).sum(), points)
            grads.append(g.flatten(1))
            sets.append(module[0](x) != 0)
        cosine = float(torch.nn.functional.cosine_similarity(*grads, dim=1).mean())
        overlap = float((sets[0] & sets[1]).sum() / (sets[0] | sets[1]).sum())
        zero = float((grads[0] == 0).double().mean())
        return Measurement(values={"cosine": cosine, "overlap": overlap, "zero": zero}, present=cosine < 0.5, words="x")

    def weak(self, threat_model: ThreatModel) -> Recipe:
        """PGD on the cross-entropy with many small steps."""
        attack = f"robust_ext:ObjectivePGD(steps=200, rel_step_size={0.29 / 8})"
        return Recipe(attack=attack, words="")

    def right(self, threat_model: ThreatModel) -> Recipe:
        attack = adapted_text("robust_ext:APGD(steps=50, loss='margin')", noise=0.5, eot=16)
        return Recipe(attack=attack, words="")
