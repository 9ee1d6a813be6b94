"""k-winners-take-all: only the largest activations of a layer stay, so that gradients hold only infinitesimally.

Source: Xiao, Zhong and Zheng, "Enhancing Adversarial Defense by k-Winners-Take-All" (2020), section 3; Tramer, Carlini,
Brendel and Madry, "On Adaptive Attacks to Adversarial Example Defenses" (2020), section 5, for what breaks it;
Zimmermann et al. 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import margin
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe
from robust_ext.casestudies.networks import small_features
from robust_ext.core.random import derive_seed, stream
from robust_ext.core.threat import ThreatModel
from robust_ext.defenses.training.loop import train_network

SHARE = 0.1
_FEATURES = 256
_STEPS = (1 / 1000, 1 / 4)


class Winners(nn.Module):
    """The largest tenth of each row's activations, over its whole volume; the others are zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Of activations ``(N, ...)``, in their shape; of equal ones at the limit all stay."""
        flat = x.flatten(1)
        least = flat.topk(max(round(SHARE * flat.shape[1]), 1), 1).values[:, -1:]
        return (flat * (flat >= least)).view_as(x)


class KWinners(CaseStudy):
    """A network of winners, evaluated by many tiny steps along its gradient, and without gradients."""

    title = "k-winners-take-all"
    source = "Xiao, Zhong and Zheng, ICLR 2020"
    published = Published(
        clean=0.7928,
        claimed=0.524,
        true=0.1799,
        weak_score="< .95",
        right_score=">= .95",
        source="adversarially trained, broken by AutoAttack (fra31/auto-attack, early README)",
    )
    causes = ("wrong_gradient", "gradient_free_wins", "random_wins")
    notes = (
        "The paper's attack estimates gradients by up to 852,000 queries, against 400 random points, so that its "
        "R-ASR is not one of equal effort. Square takes at most 5,000 queries here; a random search of as many points "
        "is what to compare it with. The features are behind one linear layer with a ReLU, as the pooling of the "
        "authors' network has no winners after it."
    )

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        """See :meth:`CaseStudy.build`; the first activation stays a ReLU, as the authors' stem does."""
        features = small_features(shape, _FEATURES, activation=Winners)
        features[1], features[-1] = nn.ReLU(), nn.ReLU()
        return nn.Sequential(features, nn.Linear(_FEATURES, classes))

    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """Train it by the cross-entropy, without adversarial examples, as Zimmermann et al. did."""

        def loss(rows: Tensor) -> Tensor:
            return nn.functional.cross_entropy(module(inputs[rows]), labels[rows])

        train_network(module, len(inputs), loss, epochs=12, batch_size=64, learning_rate=2e-3, seed=seed)

    def measure(
        self, module: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
    ) -> Measurement:
        """How far the gradient is from what the margin does, in steps along random signs."""
        points, apart = inputs.clone().requires_grad_(True), []
        with torch.enable_grad():
            before = margin(module(points), labels)
            (gradient,) = torch.autograd.grad(before.sum(), points)
        signs = torch.randn(inputs.shape, generator=stream(seed, "signs")).sign()
        for share in _STEPS:
            moved = share * threat_model.epsilon * signs
            with torch.no_grad():
                change = margin(module(inputs + moved), labels) - before
            promised = (gradient * moved).flatten(1).sum(1)
            apart.append(float((change - promised).abs().sum() / change.abs().sum()))
        kept = self._kept(module, inputs, threat_model, seed=seed)
        values = {"apart over a thousandth": apart[0], "apart over a quarter": apart[1], "winners that stay": kept}
        words = (
            "How far changes of the margin are from what the gradient promises, as a share of them, in steps of a "
            "thousandth and of a quarter of epsilon along random signs, and the share of winners that are also those "
            "of a random point of the ball. There where the second is above .5 and winners change."
        )
        return Measurement(values=values, present=apart[1] > 0.5 and kept < 1, words=words)

    def _kept(self, module: nn.Module, inputs: Tensor, threat_model: ThreatModel, *, seed: int) -> float:
        keys = [derive_seed(seed, number, "winners") for number in range(len(inputs))]
        points = threat_model.sample_inner(inputs, 1, key=keys)[:, 0]
        chosen: list[Tensor] = []
        last = [part for part in module.modules() if isinstance(part, Winners)][-1]
        with last.register_forward_hook(lambda *call: chosen.append(call[2] != 0)), torch.no_grad():
            module(inputs)
            module(points)
        return float((chosen[0] & chosen[1]).sum() / chosen[0].sum())

    def weak(self, threat_model: ThreatModel) -> Recipe:
        """PGD on the cross-entropy, 200 steps of .29 / 255 where epsilon is 8 / 255."""
        attack = f"robust_ext:ObjectivePGD(steps=200, rel_step_size={0.29 / 8})"
        return Recipe(
            attack=attack, words="PGD by many tiny steps, each along a gradient that holds only at its point."
        )

    def right(self, threat_model: ThreatModel) -> Recipe:
        """Square, which needs no gradients."""
        attack = "robust_ext:Square(queries=1000, restarts=5)"
        return Recipe(attack=attack, words="Random search by squares on the margin: at most 5,000 queries.")
