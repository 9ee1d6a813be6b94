"""Objectives that attacks maximise: losses of rows ``(N,)``, from logits ``(N, K)`` and labels ``(N,)``, by name.

Sources: Carlini and Wagner, "Towards Evaluating the Robustness of Neural Networks" (2017), for the margin; Croce and
Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free attacks" (2020),
equations 6 and 7, for the difference of logits ratio (DLR); Granese et al., "MEAD: A Multi-Armed Approach for
Evaluation of Adversarial Examples Detectors" (2022), equations 3 to 6, for :data:`DIVERGENCES`, which may compare with
the logits of the natural input. All take logits, so that probabilities too small for their dtype do no harm: values and
gradients are finite wherever the logits are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.criteria import MISCLASSIFICATION, Criterion
from robust_ext.core.validation import check_choice

Loss = Callable[[Tensor, Tensor], Tensor]

# Keeps the ratios finite where the largest logits are equal; far below any difference that decides anything.
_LEAST = 1e-12


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """``log(sum_i exp z_i) - z_y``, at least 0."""
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """``max_{i != y} z_i - z_y``: above 0 exactly where the label does not win (f_6 of Carlini and Wagner)."""
    return MISCLASSIFICATION.margin(logits, labels)


def dlr(logits: Tensor, labels: Tensor) -> Tensor:
    """``(max_{i != y} z_i - z_y) / (z_(1) - z_(3))``, ``z_(1) >= z_(2) >= ...``: equation 6 of Croce and Hein.

    Neither shifting nor scaling the logits changes it. K is at least 3; the value is at most 1 where the label is among
    the three largest.
    """
    top = logits.topk(3, 1).values
    return margin(logits, labels) / (top[:, 0] - top[:, 2]).clamp_min(_LEAST)


def aimed_margin(logits: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """``z_t - z_y`` for true labels y and aims t: above 0 only where the label does not win."""
    return _chosen(logits, classes) - _chosen(logits, labels)


def aimed_dlr(logits: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """``(z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2)`` for true labels y and aims t (equation 7); K is at least 4."""
    return aimed_margin(logits, labels, classes) / _spread_of_four(logits)


def _margin_ratio(logits: Tensor, labels: Tensor) -> Tensor:
    """Equation 7 where only one of y and t is known: the other is the best of the other classes."""
    return margin(logits, labels) / _spread_of_four(logits)


@dataclass(frozen=True)
class Objective:
    """A loss of true labels to maximise, with the fewest classes that it takes; its negative is for labels to aim at.

    With ``aimed``, a loss of true labels and aims, an untargeted attack aims at one other class after another.
    """

    loss: Loss
    minimum_classes: int = 2
    aimed: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    @property
    def aims(self) -> bool:
        """True if an untargeted attack aims at classes with it."""
        return self.aimed is not None

    def of_kind(self, goal: Criterion) -> Loss:
        """The loss for labels to aim at, or for true labels; the margin of a criterion that ranks."""
        if goal.ranks:
            return goal.margin
        return (lambda logits, labels: -self.loss(logits, labels)) if goal.aims else self.loss


OBJECTIVES: dict[str, Objective] = {
    "ce": Objective(cross_entropy),
    "margin": Objective(margin),
    "dlr": Objective(dlr, minimum_classes=3),
    "targeted-dlr": Objective(_margin_ratio, minimum_classes=4, aimed=aimed_dlr),
    "targeted-margin": Objective(margin, aimed=aimed_margin),
}


def kl(logits: Tensor, natural: Tensor) -> Tensor:
    """``sum_y p(y) log(p(y) / q(y))``, p natural and q adversarial (equation 4), at least 0 but for rounding.

    It is least where both agree: the gradient there is 0, or what rounding leaves of it, so that an ascent by its
    sign would go in directions of noise. Ascents should start elsewhere.
    """
    log_p, log_q = natural.log_softmax(1), logits.log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def gini(logits: Tensor) -> Tensor:
    """``1 - ||q||_2``, q adversarial: how undecided the classifier is (equation 6).

    From 0 where one class has everything to ``1 - K ** -.5`` where all have the same. It is computed from the
    differences to the largest logit, and keeps its value and gradient where the largest probability rounds to 1.
    """
    first = logits.argmax(1, keepdim=True)
    # 0 at the largest, r = q / max q elsewhere: ||q|| = (1 + sum r^2)^.5 / (1 + sum r).
    ratios = (logits - logits.gather(1, first)).scatter(1, first, -torch.inf).exp()
    return -torch.expm1(ratios.square().sum(1).log1p() / 2 - ratios.sum(1).log1p())


def fisher_rao(logits: Tensor, natural: Tensor) -> Tensor:
    """``2 arccos(sum_y (p(y) q(y))^.5)``, p natural and q adversarial (equation 5).

    As ``4 arcsin(||p^.5 - q^.5||_2 / 2)``, which is the same angle, measured by the chord instead of the cosine: the
    arccos has no finite gradient at 1, and a sum that rounds to more than 1 has no arccos.

    It is a distance: near the natural input its gradient has no small length, but where both agree exactly it has none,
    and 0 is taken; nearby, rounding decides its direction. Ascents should start elsewhere.
    """
    difference = (logits.log_softmax(1) / 2).exp() - (natural.log_softmax(1) / 2).exp()
    chord: Tensor = torch.linalg.vector_norm(difference, dim=1)
    return 4 * (chord / 2).asin()


@dataclass(frozen=True)
class Divergence:
    """An objective of the logits of points, the logits of the natural inputs and the true labels.

    ``compares`` is whether it looks at the logits of the natural inputs. It then has no gradient there.
    """

    value: Callable[[Tensor, Tensor, Tensor], Tensor]
    compares: bool


DIVERGENCES: dict[str, Divergence] = {
    "ace": Divergence(lambda logits, _natural, labels: cross_entropy(logits, labels), compares=False),
    "kl": Divergence(lambda logits, natural, _labels: kl(logits, natural), compares=True),
    "gini": Divergence(lambda logits, _natural, _labels: gini(logits), compares=False),
    "fisher-rao": Divergence(lambda logits, natural, _labels: fisher_rao(logits, natural), compares=True),
}


def find_divergence(name: str, *, argument: str = "objective") -> Divergence:
    """The objective of a name in :data:`DIVERGENCES`; error messages call the name ``argument``."""
    return DIVERGENCES[check_choice(argument, name, DIVERGENCES)]


def _chosen(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None]).squeeze(1)


def _spread_of_four(logits: Tensor) -> Tensor:
    top = logits.topk(4, 1).values
    return (top[:, 0] - (top[:, 2] + top[:, 3]) / 2).clamp_min(_LEAST)
