"""What attacks maximise: losses of single rows, from logits ``(N, K)`` and labels ``(N,)``, by name.

Sources: Carlini and Wagner, "Towards Evaluating the Robustness of Neural Networks" (2017), for the margin; Croce and
Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free attacks" (2020),
equations 6 and 7, for the difference of logits ratio (DLR).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]

# Keeps the ratios finite where the largest logits are equal; far below any difference that decides anything.
_LEAST = 1e-12


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """``log(sum_i exp z_i) - z_y``.

    Args:
        logits: Floating point ``(N, K)``, K at least 2.
        labels: int64 ``(N,)``.

    Returns:
        ``(N,)``, at least 0.

    Example:
        >>> cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor([0.6931])
    """
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """``max_{i != y} z_i - z_y``: above 0 exactly where the label does not win (f_6 of Carlini and Wagner, unclipped).

    Args:
        logits: Floating point ``(N, K)``, K at least 2.
        labels: int64 ``(N,)``.

    Returns:
        ``(N,)``.

    Example:
        >>> margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]))
        tensor([-1.])
    """
    return _largest_other(logits, labels) - _chosen(logits, labels)


def dlr(logits: Tensor, labels: Tensor) -> Tensor:
    """``(max_{i != y} z_i - z_y) / (z_(1) - z_(3))``, ``z_(1) >= z_(2) >= ...``: equation 6 of Croce and Hein.

    Neither shifting nor scaling the logits changes it.

    Args:
        logits: Floating point ``(N, K)``, K at least 3.
        labels: int64 ``(N,)``.

    Returns:
        ``(N,)``; at most 1 where the label is among the three largest.

    Example:
        >>> dlr(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]))
        tensor([-0.5000])
    """
    top = logits.topk(3, 1).values
    return margin(logits, labels) / (top[:, 0] - top[:, 2]).clamp_min(_LEAST)


def aimed_dlr(logits: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """``(z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2)``: equation 7 of Croce and Hein, for labels and aims.

    Args:
        logits: Floating point ``(N, K)``, K at least 4.
        labels: int64 ``(N,)``: y, the true classes.
        classes: int64 ``(N,)``: t, the classes to aim at.

    Returns:
        ``(N,)``.

    Example:
        >>> aimed_dlr(torch.tensor([[5.0, 1.0, 2.0, 3.0]]), torch.tensor([0]), torch.tensor([2]))
        tensor([-0.8571])
    """
    return (_chosen(logits, classes) - _chosen(logits, labels)) / _spread_of_four(logits)


def _margin_ratio(logits: Tensor, labels: Tensor) -> Tensor:
    """Equation 7 where only one of y and t is known: the other is the best of the other classes."""
    return margin(logits, labels) / _spread_of_four(logits)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss as attacks choose it.

    Args:
        untargeted: To maximise for true labels; ``(logits, labels) -> (N,)``.
        targeted: To maximise for labels to aim at.
        minimum_classes: Fewest columns of the logits that it takes.
        aims: Whether an untargeted attack aims at one other class after another with it, by :func:`aimed_dlr`.
    """

    untargeted: Loss
    targeted: Loss
    minimum_classes: int = 2
    aims: bool = False

    def of_kind(self, *, targeted: bool) -> Loss:
        """The loss for labels to aim at, or for true labels."""
        return self.targeted if targeted else self.untargeted

    @classmethod
    def of(cls, loss: Loss, *, minimum_classes: int = 2, aims: bool = False) -> Objective:
        """A loss whose negative is its targeted form."""
        return cls(untargeted=loss, targeted=lambda z, y: -loss(z, y), minimum_classes=minimum_classes, aims=aims)


OBJECTIVES: dict[str, Objective] = {
    "ce": Objective.of(cross_entropy),
    "margin": Objective.of(margin),
    "dlr": Objective.of(dlr, minimum_classes=3),
    "targeted-dlr": Objective.of(_margin_ratio, minimum_classes=4, aims=True),
}


def _chosen(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None]).squeeze(1)


def _largest_other(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.scatter(1, labels[:, None], -torch.inf).max(1).values


def _spread_of_four(logits: Tensor) -> Tensor:
    top = logits.topk(4, 1).values
    return (top[:, 0] - (top[:, 2] + top[:, 3]) / 2).clamp_min(_LEAST)
