"""Orthogonal and selective PGD: one of classifier and detector is attacked at a time.

Source: Bryniarski, Hingun, Pachuca, Wang, Carlini, "Evading Adversarial Example Detection Defenses with Orthogonal
Projected Gradient Descent" (2021), sections 4.1 (selective) and 4.2 (orthogonal).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.attacks._common.detector_aware import Ascent, AttackProblem, BestTracker, ScoreGradientAttack
from robust_ext.attacks._common.objectives import OBJECTIVES
from robust_ext.attacks._common.rows import over_rows
from robust_ext.core.settings import setting, settings_class

# What is left of a float32 gradient below this share of its length is rounding, and no direction.
_PARALLEL = 1e-6
# Below this share of the gradient a row has gone as far as it can without the other of the two; chosen among 1e-6 to
# 1.1 on small digits networks, see docs/evidence/defaults.md.
_STUCK = 0.25
# Points closer to the surface of a ball than this share of epsilon lie on it.
_SURFACE = 1e-5
# Rounds in which values that would be pushed across a limit are taken out, before the rest is left to the projection.
_ROUNDS = 4


@settings_class
class _AlternatingPGD(ScoreGradientAttack):
    """Steps up the classifier's loss where a row is not misclassified, and down the detector's score where it is."""

    steps: int = setting(default=1000)
    loss: str = setting(default="margin", help='Of the classifier: ``"margin"`` or ``"ce"``.', choices=("margin", "ce"))
    confidence: float = setting(
        default=0.0, help="Margin in logits from which a row counts as misclassified here.", minimum=0
    )

    @abstractmethod
    def direction(self, gradient: Tensor, other: Tensor, *, above: Tensor, below: Tensor, normal: Tensor) -> Tensor:
        """Return the direction of the step; all ``(N, D)``. ``other`` is the gradient of the other objective.

        ``above`` are values that cannot rise, ``below`` those that cannot fall, and ``normal`` points to where the ball
        ends, zeros inside it.
        """

    def ascent(self, problem: AttackProblem, tracker: BestTracker) -> Ascent:
        """See :meth:`DetectorAwareAttack.ascent`."""
        loss = OBJECTIVES[self.loss].of_kind(problem.goal)

        def advance(points: Tensor, number: int) -> tuple[Tensor, Tensor]:
            found, value, of_loss, of_score = tracker.differentiate(points, loss)
            done = found.misclassified & (found.margin >= self.confidence)
            up = torch.where(over_rows(done, points), -of_score, of_loss)
            other = torch.where(over_rows(done, points), of_loss, of_score)
            above, below, normal = _limits(problem, points)
            way = self.direction(up.flatten(1), other.flatten(1), above=above, below=below, normal=normal)
            return torch.where(done, -found.score_margin, value), way.view(points.shape)

        return advance


@settings_class
class SelectivePGD(_AlternatingPGD):
    """Follows the classifier's gradient where a row is not misclassified, and the detector's where it is (section 4.1).

    A step that is aimed at the detector never raises its score, to first order: the published code ascends there, by a
    sign. What is kept is the misclassified point of lowest score margin, a success if there was one; the one of highest
    margin where none was misclassified. Each step sends every row forward once and back twice for each of the
    ``samples``; the end of each run takes one more forward pass for each.

    Targets need a detector with gradients. For targeted attacks the labels are the classes to aim at. The published
    step size is constant, and its step is along the gradient (``step="l2"``).

    Example:
        >>> SelectivePGD(steps=50).traits.detector
        True
    """

    name = "SelectivePGD"

    def direction(self, gradient: Tensor, other: Tensor, *, above: Tensor, below: Tensor, normal: Tensor) -> Tensor:
        """The gradient itself."""
        return gradient


@settings_class
class OrthogonalPGD(_AlternatingPGD):
    """Selective PGD along the part of each gradient that leaves the other of the two as it is (section 4.2).

    Where a row is not misclassified it follows the classifier's gradient less its component along the detector's, and
    where it is, the detector's less its component along the classifier's. Values that would be pushed across the bounds
    (or out of an linf ball) are taken out of both first, and so is what would leave an l2 ball: the projection would
    bring the component back. Where less than a quarter of a gradient's length is left, the step is
    the selective one; the paper has no such rule. With ``step="sign"`` the signs are taken afterwards, and are
    orthogonal to nothing; the paper steps along the gradient.

    For linf and l2: the surface of an l1 ball has edges almost everywhere that steps end, and projections onto it bring
    components back; selective PGD does better there. Arguments, costs and what is kept are those of
    :class:`SelectivePGD`.

    Example:
        >>> OrthogonalPGD(steps=50, confidence=0.05).traits.norms
        ('linf', 'l2')
    """

    name = "OrthogonalPGD"
    traits = replace(ScoreGradientAttack.traits, norms=("linf", "l2"))

    def direction(self, gradient: Tensor, other: Tensor, *, above: Tensor, below: Tensor, normal: Tensor) -> Tensor:
        """The gradient less its component along the other, over the values that can move."""
        free = torch.ones_like(above)
        for _ in range(_ROUNDS):
            way = _along_surface(gradient * free, other * free, normal * free)
            free &= ~((above & (way > 0)) | (below & (way < 0)))
        way = _along_surface(gradient * free, other * free, normal * free)
        stuck = way.norm(dim=1, keepdim=True) <= _STUCK * gradient.norm(dim=1, keepdim=True)
        return torch.where(stuck, gradient, way)


def without_component(gradient: Tensor, other: Tensor) -> Tensor:
    """Rows ``(N, D)`` less their components along other rows ``(N, D)``, up to rounding of float32.

    Zeros where the two are parallel; other rows of zeros have no direction, and take nothing away.
    """
    longest = other.double().abs().amax(1, keepdim=True)
    scaled = other.double() / longest.where(longest > 0, 1)
    square = scaled.square().sum(1, keepdim=True)
    size = gradient.double().abs().amax(1, keepdim=True)
    whole = gradient.double() / size.where(size > 0, 1)
    left = whole
    # Twice: the first pass leaves the rounding of what it takes away, large against what is left of near parallels.
    for _ in range(2):
        left = left - scaled * ((left * scaled).sum(1, keepdim=True) / square.where(square > 0, 1))
    parallel = left.norm(dim=1, keepdim=True) <= _PARALLEL * whole.norm(dim=1, keepdim=True)
    return (left.masked_fill(parallel, 0) * size).to(gradient.dtype)


def _along_surface(gradient: Tensor, other: Tensor, normal: Tensor) -> Tensor:
    """The gradient without its component along the other, nor one that would leave the ball."""
    way = without_component(gradient, other)
    outward = (way * normal).sum(1, keepdim=True) > 0
    return torch.where(outward, without_component(way, without_component(normal, other)), way)


def _limits(problem: AttackProblem, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks of values that cannot rise and that cannot fall, bool ``(N, D)``, and the normal of an l2 ball."""
    low, high = problem.threat_model.bounds
    lowest, highest = torch.full_like(points, low), torch.full_like(points, high)
    epsilon, offset = problem.threat_model.epsilon, (points - problem.inputs).flatten(1)
    normal = torch.zeros_like(offset)
    if problem.threat_model.norm == "linf":
        lowest, highest = (problem.inputs - epsilon).clamp_min(low), (problem.inputs + epsilon).clamp_max(high)
    elif problem.threat_model.norm == "l2":
        outside = problem.threat_model.distance(points, problem.inputs) >= (1 - _SURFACE) * epsilon
        normal = offset * outside[:, None]
    return (points >= highest).flatten(1), (points <= lowest).flatten(1), normal
