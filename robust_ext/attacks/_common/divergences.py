"""What the attacks of MEAD maximise: losses of single rows that may compare with the logits of the natural input.

Source: Granese et al., "MEAD: A Multi-Armed Approach for Evaluation of Adversarial Examples Detectors" (2022),
equations 3 to 6. All take logits, so that probabilities too small for their dtype do no harm: values and gradients are
finite wherever the logits are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.core.validation import check_choice


def kl(logits: Tensor, natural: Tensor) -> Tensor:
    """``sum_y p(y) log(p(y) / q(y))``, p natural and q adversarial (equation 4).

    It is least where both agree: the gradient there is 0, or what rounding leaves of it, so that a climb by its sign
    would go in directions of noise. Climbs should start elsewhere.

    Args:
        logits: Of the adversarial points, floating point ``(N, K)``, finite.
        natural: Of the natural inputs, ``(N, K)``.

    Returns:
        ``(N,)``, at least 0 but for rounding.

    Example:
        >>> kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0986]]))
        tensor([0.1308])
    """
    log_p, log_q = natural.log_softmax(1), logits.log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def gini(logits: Tensor) -> Tensor:
    """``1 - ||q||_2``, q adversarial: how undecided the classifier is (equation 6).

    It is computed from the differences to the largest logit, and keeps its value and gradient where the largest
    probability rounds to 1.

    Args:
        logits: Of the adversarial points, floating point ``(N, K)``, finite.

    Returns:
        ``(N,)``, from 0 where one class has everything to ``1 - K ** -.5`` where all have the same.

    Example:
        >>> gini(torch.tensor([[0.0, 0.0]]))
        tensor([0.2929])
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
    and 0 is taken; nearby, rounding decides its direction. Climbs should start elsewhere.

    Args:
        logits: Of the adversarial points, floating point ``(N, K)``, finite.
        natural: Of the natural inputs, ``(N, K)``.

    Returns:
        ``(N,)``, in [0, pi] but for rounding.

    Example:
        >>> fisher_rao(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 200.0]]))
        tensor([1.5708])
    """
    difference = (logits.log_softmax(1) / 2).exp() - (natural.log_softmax(1) / 2).exp()
    chord: Tensor = torch.linalg.vector_norm(difference, dim=1)
    return 4 * (chord / 2).asin()


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """An objective as attacks choose it.

    Args:
        value: From the logits of points, those of the natural inputs and the true labels, to what is maximised,
            ``(N,)``.
        compares: Whether it looks at the logits of the natural inputs. It then has no gradient there.
    """

    value: Callable[[Tensor, Tensor, Tensor], Tensor]
    compares: bool


DIVERGENCES: dict[str, Divergence] = {
    "ace": Divergence(value=lambda logits, _natural, labels: cross_entropy(logits, labels), compares=False),
    "kl": Divergence(value=lambda logits, natural, _labels: kl(logits, natural), compares=True),
    "gini": Divergence(value=lambda logits, _natural, _labels: gini(logits), compares=False),
    "fisher-rao": Divergence(value=lambda logits, natural, _labels: fisher_rao(logits, natural), compares=True),
}


def find_divergence(name: str, *, argument: str = "objective") -> Divergence:
    """The objective of a name in :data:`DIVERGENCES`.

    Args:
        name: ``"ace"``, ``"kl"``, ``"gini"`` or ``"fisher-rao"``.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: There is none of this name.
    """
    return DIVERGENCES[check_choice(argument, name, DIVERGENCES)]
