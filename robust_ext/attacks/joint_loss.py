"""Joint loss: the classifier's loss less the detector's score margin, with a weight that each row searches for itself.

Source: Carlini and Wagner, "Adversarial Examples Are Not Easily Detected: Bypassing Ten Detection Methods" (2017),
section 2.3. Their search for the weight repeats the whole attack for each value ("Towards Evaluating the Robustness of
Neural Networks", 2017, section VI); here it moves at every step, as the multiplier of a constraint does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.best_tracker import AttackProblem, BestTracker, Prediction
from robust_ext.attacks._common.detector_aware import ScoreGradientAttack
from robust_ext.attacks._common.objectives import OBJECTIVES, Loss
from robust_ext.attacks._common.rows import over_rows
from robust_ext.attacks.native import Step
from robust_ext.core.settings import setting, settings_class
from robust_ext.models.normalized import PaddedClasses

# What a weight is multiplied or divided by after a step.
_FACTOR = 2.0
# Weights stay in this range, in their units, as a row may be rejected, or not misclassified, for thousands of steps.
_SMALLEST, _LARGEST = 1e-8, 1e8


@settings_class
class JointLoss(ScoreGradientAttack):
    """Maximises ``loss - alpha x max(score margin, 0)``, with an alpha for each row that follows it.

    After each step alpha doubles where the point is rejected, and halves where it passes and is not misclassified;
    where it is a success it stays. So a first value that is wrong by a factor of a thousand costs ten steps, and no run
    is spent on finding it. Alpha is in units of the ratio of the two gradients' lengths where the row first has both;
    a further run starts with the one that the last run came to. What is kept is the misclassified point of lowest score
    margin of all runs, a success if there was one; the one of highest margin where none was misclassified.

    Each step sends every row forward once and back twice for each of the ``samples``; the end of each run takes one
    more forward pass for each.

    Steps are along the gradient and shrink, by default: rows then settle where the score margin is about to rise above
    0. Steps of signs jump over that edge in every value at once. Targets need a detector with gradients. For targeted
    attacks the labels are the classes to aim at.

    Example:
        >>> JointLoss(steps=50, restarts=5).name
        'JointLoss'
    """

    name = "JointLoss"

    steps: int = setting(default=100, trial=10)
    rel_step_size: float = setting(default=0.2)
    restarts: int = setting(default=2, trial=1)
    loss: str = setting(
        default="margin",
        help='Of the classifier: ``"ce"``, ``"margin"``, ``"dlr"`` or ``"targeted-dlr"``; targets with fewer classes '
        "than it needs are padded.",
        choices=tuple(OBJECTIVES),
    )
    alpha: float = setting(default=1.0, help="Weight of the detector at the first step.", above=0)

    def attack(self, problem: AttackProblem) -> Tensor:
        """See :meth:`DetectorAwareAttack.attack`."""
        tracker = BestTracker(problem, name=self.name, samples=self.samples)
        weights, loss = _Weights(problem.inputs, self.alpha), _loss(self.loss, targeted=problem.targeted)
        total = self.restarts * self.steps
        for restart in range(self.restarts):
            points = problem.start(self.start, restart=restart)
            for number in range(self.steps):
                prediction, value, of_loss, of_score = tracker.differentiate(points, loss)
                alpha = weights.of(of_loss.flatten(1), of_score.flatten(1))
                weight = over_rows(torch.where(prediction.score_margin >= 0, alpha, 0), points)
                gradient = of_loss - weight * of_score
                if problem.watch is not None:
                    shown = (value - alpha * prediction.score_margin.clamp_min(0)).nan_to_num(nan=-torch.inf)
                    at = restart * self.steps + number
                    problem.watch(Step(number=at, total=total, points=points, loss=shown, gradient=gradient))
                weights.follow(prediction)
                points = self.move(problem, points, gradient, number=number)
            tracker.evaluate(points)
        return tracker.result()


class _Weights:
    """The weight of each row."""

    def __init__(self, inputs: Tensor, alpha: float) -> None:
        self._alpha = inputs.new_full((len(inputs),), alpha)
        self._unit = torch.full_like(self._alpha, torch.nan)

    def of(self, of_loss: Tensor, of_score: Tensor) -> Tensor:
        """The weights ``(N,)``, in units that the first gradients ``(N, D)`` that are not zero settle."""
        ratio = of_loss.norm(dim=1) / of_score.norm(dim=1)
        ratio = ratio.where((ratio > 0) & torch.isfinite(ratio), torch.nan)
        self._unit = torch.where(self._unit.isnan(), ratio, self._unit)
        return self._alpha * self._unit.nan_to_num(nan=1.0)

    def follow(self, found: Prediction) -> None:
        """Move the weights by the predictions for the points that they were used at."""
        less = found.passed & ~found.misclassified
        factor = torch.where(found.passed, torch.where(less, 1 / _FACTOR, 1.0), _FACTOR)
        self._alpha = (self._alpha * factor).clamp(_SMALLEST, _LARGEST)


def _loss(name: str, *, targeted: bool) -> Loss:
    objective = OBJECTIVES[name]
    loss = objective.of_kind(targeted=targeted)
    padded = PaddedClasses(nn.Identity(), classes=objective.minimum_classes)
    return lambda logits, labels: loss(padded(logits), labels)
