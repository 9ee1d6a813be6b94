"""k-winners-take-all: only the largest activations of a layer stay, so that gradients hold only infinitesimally.

Source: Xiao, Zhong and Zheng, "Enhancing Adversarial Defense by k-Winners-Take-All" (2020), section 3; Tramer, Carlini,
Brendel and Madry, "On Adaptive Attacks to Adversarial Example Defenses" (2020), section 5, for the attack that breaks
it; Zimmermann et al. 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import margin
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe, Trained
from robust_ext.casestudies.networks import Training, small_features
from robust_ext.core.random import stream

_SHARE, _FEATURES = 0.1, 256
_STEPS = (1 / 1000, 1 / 4)


class Winners(nn.Module):
    """A layer that keeps the largest tenth of each row's activations, and sets the others to zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Return activations ``(N, ...)`` in their shape; equal ones at the limit all stay."""
        flat = x.flatten(1)
        least = flat.topk(max(round(_SHARE * flat.shape[1]), 1), 1).values[:, -1:]
        return (flat * (flat >= least)).view_as(x)


class KWinners(CaseStudy[nn.Sequential]):
    """A network of winners, evaluated by many tiny steps along its gradient, and without gradients.

    It is trained without adversarial examples, as by Zimmermann et al.
    """

    title = "k-winners-take-all"
    source = "Xiao, Zhong and Zheng, ICLR 2020"
    published = Published(clean=0.7928, claimed=0.524, true=0.1799, weak_score="< .95", right_score=">= .95")
    published_in = "adversarially trained, broken by AutoAttack (fra31/auto-attack, early README)"
    weak = Recipe(
        # Steps of .29 / 255 where epsilon is 8 / 255.
        attack=f"robust_ext:ObjectivePGD(steps=200, rel_step_size={0.29 / 8})",
        words="PGD by many tiny steps, each along a gradient that holds only at its point.",
    )
    right = Recipe(
        attack="robust_ext:Square(queries=1000, restarts=5)",
        words="Random search by squares on the margin: at most 5,000 queries.",
    )
    causes = ("wrong_gradient", "gradient_free_wins", "random_wins")
    training = Training(epochs=(12, 12), batch_size=64, learning_rate=(2e-3, 2e-3))
    notes = (
        "The paper's attack estimates gradients by up to 852,000 queries, against 400 random points, so that its "
        "R-ASR is not one of equal effort. Square takes at most 5,000 queries here; a random search of as many points "
        "is what to compare it with. The features are behind one linear layer with a ReLU, as the pooling of the "
        "authors' network has no winners after it."
    )

    def build(self, shape: Sequence[int], classes: int) -> nn.Sequential:
        """Return the network; the first activation stays a ReLU, as in the authors' stem."""
        features = small_features(shape, _FEATURES, activation=Winners)
        features[1], features[-1] = nn.ReLU(), nn.ReLU()
        return nn.Sequential(features, nn.Linear(_FEATURES, classes))

    def measure(self, case: Trained[nn.Sequential]) -> Measurement:
        """Compare changes of the margin with those that its gradient promises, in steps along random signs."""
        before, gradient, apart = margin(case.logits(), case.labels), case.gradients(loss=margin), []
        signs = torch.randn(case.inputs.shape, generator=stream(case.seed, "signs")).sign()
        for share in _STEPS:
            moved = share * case.threat_model.epsilon * signs
            change = margin(case.logits(case.inputs + moved), case.labels) - before
            promised = (gradient * moved.flatten(1)).sum(1)
            apart.append(float((change - promised).abs().sum() / change.abs().sum()))
        kept = self._kept(case)
        values = {"apart over a thousandth": apart[0], "apart over a quarter": apart[1], "winners that stay": kept}
        words = (
            "How far changes of the margin are from what the gradient promises, as a share of them, in steps of a "
            "thousandth and of a quarter of epsilon along random signs, and the share of winners that are also those "
            "of a random point of the ball. There where the second is above .5 and winners change."
        )
        return Measurement(values=values, present=apart[1] > 0.5 and kept < 1, words=words)

    def _kept(self, case: Trained[nn.Sequential]) -> float:
        """Return the share of the last layer's winners that also win at random points nearby."""
        chosen: list[Tensor] = []
        last = [part for part in case.module.modules() if isinstance(part, Winners)][-1]
        with last.register_forward_hook(lambda *call: chosen.append(call[2] != 0)):
            case.logits()
            case.logits(case.nearby("winners"))
        return float((chosen[0] & chosen[1]).sum() / chosen[0].sum())
