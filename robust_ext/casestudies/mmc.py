"""The Max-Mahalanobis centre loss: features are drawn to fixed centres, and the nearest one wins.

Its authors' adaptive attack moves features away from their own centre, which need not bring them nearer to any other.
Cross-entropy fails too: with centres this far apart the softmax of the distances is one-hot in float32.

Source: Pang et al., "Rethinking Softmax Cross-Entropy Loss for Adversarial Robustness" (2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.rows import NO_GRADIENTS, gradient_of, project, query
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Batch, NativeAttack, Step
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe, Trained
from robust_ext.casestudies.networks import Parts, Training, small_features
from robust_ext.core.errors import AttackError
from robust_ext.core.settings import setting, settings_class

# Length of the centres (the paper's C_MM) and the number of their coordinates.
_LENGTH, _COORDINATES = 10.0, 256
# Least share of the points with unchanged labels that the authors' attack moves away from their centre.
_AWAY = 0.5


def simplex_centres(classes: int, coordinates: int, length: float) -> Tensor:
    """Return centres ``(classes, coordinates)`` of one length, any two at a cosine of ``-1 / (classes - 1)``.

    They are the corners of a regular simplex, as far apart as possible (Pang et al. 2020, equation 5).

    Example:
        >>> simplex_centres(3, 4, 1.0).norm(dim=1)
        tensor([1., 1., 1.])
    """
    corners = torch.eye(classes) - 1 / classes
    return nn.functional.pad(length * nn.functional.normalize(corners, dim=1), (0, coordinates - classes))


class CentreDistances(nn.Module):
    """Logits ``(N, K)``: minus the squared distances of features ``(N, D)`` from K centres ``(K, D)``."""

    centres: Tensor

    def __init__(self, centres: Tensor) -> None:
        super().__init__()
        self.register_buffer("centres", centres)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits."""
        return -(features[:, None] - self.centres).square().sum(2)


@settings_class
class LeaveCentre(NativeAttack):
    """Steps by the sign of the gradient that lower one class's logit alone: away from its centre, towards no other.

    This is the adaptive attack of Pang et al. 2020, section 5.2, from the input, on any target whose logits are
    distances.
    """

    name = "leave-centre"
    traits = AttackTraits(batching="full", failure="last", seeds="none")
    aims = False

    steps: int = setting(default=50, help="Gradient steps, at least 1.", minimum=1)
    rel_step_size: float = setting(default=0.25, help="Step size relative to epsilon.", above=0)
    predicted: bool = setting(
        default=True, help="Whether the class is the predicted one, as in the authors' test, or that of the label."
    )

    def candidates(self, batch: Batch) -> Tensor:
        """See :meth:`NativeAttack.candidates`."""
        target, inputs, missing = batch.target, batch.inputs, AttackError(f"{self.name}: the target {NO_GRADIENTS}")
        own = query(target, inputs).argmax(1) if self.predicted else batch.labels
        points, size = inputs.clone(), self.rel_step_size * batch.threat_model.epsilon
        for number in range(self.steps):
            points = points.detach().requires_grad_(True)
            with torch.enable_grad():
                value = -target.module(points).gather(1, own[:, None]).squeeze(1)
                gradient = gradient_of(value, points, missing)
            points, value = points.detach(), value.detach()
            if batch.watch is not None:
                batch.watch(Step(number=number, total=self.steps, points=points, loss=value, gradient=gradient))
            points = project(points + size * gradient.sign(), inputs, batch.threat_model)
        return points


Network = Parts[nn.Sequential, CentreDistances]


class MaxMahalanobis(CaseStudy[Network]):
    """A small network ``z`` (256 values), trained by ``||z - mu_y||^2`` alone, with logits ``-||z - mu_k||^2``.

    The paper has a ResNet, as many values, and centres of the same kind, 10 times a simplex. The budgets are those at
    which its claim and the truth lie apart in networks this small.
    """

    title = "Max-Mahalanobis centres"
    source = "Pang et al., Rethinking Softmax Cross-Entropy Loss for Adversarial Robustness (2020)"
    epsilons: ClassVar = {"digits": 0.2, "mnist": 0.15, "cifar10": 8 / 255}
    published = Published(clean=0.936, claimed=0.46, true=0.005, weak_score="< .95", right_score=">= .95")
    published_in = "robust-ml issue 10 (clean, claimed); Tramer et al. 2020, section 8 (true); scores: figures only"
    weak = Recipe(
        attack=LeaveCentre(),
        words="50 steps of epsilon / 4 away from the centre of the predicted class, towards no other centre.",
    )
    right = Recipe(
        attack="robust_ext:APGD(steps=200, loss='margin')",
        words="APGD on the difference of the squared distances from the nearest other centre and from one's own, "
        "which is linear in the features, as of Tramer et al. 2020, section 8.",
    )
    causes = ("saturated_loss", "predicted_labels")
    training = Training(epochs=(10, 10), images=30_000)
    settings: ClassVar = {"readout": "prototypes"}
    notes = (
        "The paper's harness accepts a readout that puts the planted point and one inner point on their sides, and "
        "does not look at the clean sample; here all inner points have to be on theirs. The authors' attack, and the "
        "paper's test of it, use predicted labels."
    )

    def build(self, shape: Sequence[int], classes: int) -> Network:
        """See :meth:`CaseStudy.build`."""
        coordinates = max(_COORDINATES, classes)
        features = nn.Sequential(*small_features(shape, 256), nn.Linear(256, coordinates))
        return Parts(features, CentreDistances(simplex_centres(classes, coordinates, _LENGTH)))

    def loss(self, module: Network, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared distance from the centre of the label."""
        own: Tensor = module(inputs).gather(1, labels[:, None])
        return -own.mean()

    def measure(self, case: Trained[Network]) -> Measurement:
        """Measure how often the authors' attack leaves a centre and reaches no other, and gradients of zero."""
        before, after = case.logits(), case.logits(case.attacked(LeaveCentre(predicted=False)))
        kept = (after.argmax(1) == case.labels) & (before.argmax(1) == case.labels)
        own_before, own_after = (logits.gather(1, case.labels[:, None]).squeeze(1) for logits in (before, after))
        share = float(((own_after < own_before) & kept).sum() / kept.sum().clamp_min(1))
        vanished = float((case.gradients() == 0).all(1).float().mean())
        return Measurement(
            values={
                "share of kept labels farther from their centre": share,
                "distance from it, relative to before": float((own_after / own_before)[kept].median().sqrt()),
                "share of zero cross-entropy gradients": vanished,
            },
            present=share > _AWAY and bool(kept.any()) and vanished > 0,
            words="The authors' attack, given true labels, moves more than half of the points whose label it does not "
            "change away from their own centre; and some gradients of cross-entropy are zero in float32.",
        )
