"""Joint loss: the classifier's loss less the detector's score margin, with a weight that each row searches for itself.

Source: Carlini and Wagner, "Adversarial Examples Are Not Easily Detected: Bypassing Ten Detection Methods" (2017),
section 2.3; the search for the weight is that of their "Towards Evaluating the Robustness of Neural Networks" (2017),
section VI.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.best_tracker import AttackProblem, BestTracker
from robust_ext.attacks._common.detector_aware import ScoreGradientAttack
from robust_ext.attacks._common.objectives import OBJECTIVES, Loss
from robust_ext.attacks._common.rows import over_rows
from robust_ext.attacks.native import Step
from robust_ext.core.settings import setting, settings_class
from robust_ext.models.padded import PaddedClasses

# What a weight is multiplied or divided by while only one end of its interval is known.
_FACTOR = 10.0


@settings_class
class JointLoss(ScoreGradientAttack):
    """Maximises ``loss - alpha x max(score margin, 0)``, with an alpha for each row that is bisected over the restarts.

    After a run without a success alpha rises where the run's best point is rejected, and falls where it passes and is
    not misclassified: by factors of ten at first, by geometric means once both ends are known. Alpha is in units of the
    ratio of the two gradients' lengths where the row first has both. After a run with a success it stays. What is kept
    is the misclassified point of lowest score margin of all runs, a success if there was one; the one of highest margin
    where none was misclassified.

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
    restarts: int = setting(
        default=10, help="Runs, and so values of alpha that can be tried.", minimum=1, trial=3, art="num_random_init"
    )
    loss: str = setting(
        default="margin",
        help='Of the classifier: ``"ce"``, ``"margin"``, ``"dlr"`` or ``"targeted-dlr"``; targets with fewer classes '
        "than it needs are padded.",
        choices=tuple(OBJECTIVES),
    )
    alpha: float = setting(default=1.0, help="Weight of the detector in the first run.", above=0)

    def attack(self, problem: AttackProblem) -> Tensor:
        """See :meth:`DetectorAwareAttack.attack`."""
        tracker = BestTracker(problem, name=self.name, samples=self.samples)
        weights = _Weights(problem.inputs, self.alpha)
        for restart in range(self.restarts):
            points = problem.start(self.start, restart=restart)
            weights.learn(*self._run(problem, tracker, weights, points, restart))
        return tracker.result()

    def _run(
        self, problem: AttackProblem, tracker: BestTracker, weights: _Weights, points: Tensor, restart: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One ascent: whether each row succeeded, and whether its best point is misclassified and passes."""
        loss = _loss(self.loss, targeted=problem.targeted)
        highest = torch.full_like(points.flatten(1)[:, 0], -torch.inf)
        solved = torch.zeros_like(highest, dtype=torch.bool)
        misclassified, passed = solved, solved
        for number in range(self.steps):
            prediction, value, of_loss, of_score = tracker.differentiate(points, loss)
            alpha = weights.of(of_loss.flatten(1), of_score.flatten(1))
            value = (value - alpha * prediction.score_margin.clamp_min(0)).nan_to_num(nan=-torch.inf)
            weight = over_rows(torch.where(prediction.score_margin >= 0, alpha, 0), points)
            gradient = of_loss - weight * of_score
            if problem.watch is not None:
                at, total = restart * self.steps + number, self.restarts * self.steps
                problem.watch(Step(number=at, total=total, points=points, loss=value, gradient=gradient))
            better = value > highest
            highest = torch.where(better, value, highest)
            misclassified = torch.where(better, prediction.misclassified, misclassified)
            passed = torch.where(better, prediction.passed, passed)
            solved = solved | prediction.success
            points = self.move(problem, points, gradient, number=number)
        return solved | tracker.evaluate(points).success, misclassified, passed


class _Weights:
    """The weight of each row, and the interval in which it is looked for."""

    def __init__(self, inputs: Tensor, alpha: float) -> None:
        self._alpha = inputs.new_full((len(inputs),), alpha)
        self._low, self._high = torch.zeros_like(self._alpha), torch.full_like(self._alpha, torch.inf)
        self._unit = torch.full_like(self._alpha, torch.nan)

    def of(self, of_loss: Tensor, of_score: Tensor) -> Tensor:
        """The weights ``(N,)``, in units that the first gradients ``(N, D)`` that are not zero settle."""
        ratio = of_loss.norm(dim=1) / of_score.norm(dim=1)
        ratio = ratio.where((ratio > 0) & torch.isfinite(ratio), torch.nan)
        self._unit = torch.where(self._unit.isnan(), ratio, self._unit)
        return self._alpha * self._unit.nan_to_num(nan=1.0)

    def learn(self, solved: Tensor, misclassified: Tensor, passed: Tensor) -> None:
        """Move the weights of rows that are not solved."""
        more, less = ~solved & ~passed, ~solved & passed & ~misclassified
        self._low = torch.where(more, self._alpha, self._low)
        self._high = torch.where(less, self._alpha, self._high)
        both = (self._low > 0) & torch.isfinite(self._high)
        middle = (self._low * self._high).sqrt()
        tried = torch.where(more, self._alpha * _FACTOR, self._alpha / _FACTOR)
        self._alpha = torch.where(more | less, torch.where(both, middle, tried), self._alpha)


def _loss(name: str, *, targeted: bool) -> Loss:
    objective = OBJECTIVES[name]
    loss = objective.of_kind(targeted=targeted)
    padded = PaddedClasses(nn.Identity(), classes=objective.minimum_classes)
    return lambda logits, labels: loss(padded(logits), labels)
