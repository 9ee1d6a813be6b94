"""Joint loss: the classifier's loss less the detector's score margin, with a weight that each row searches for itself.

Source: Carlini and Wagner, "Adversarial Examples Are Not Easily Detected: Bypassing Ten Detection Methods" (2017),
section 2.3. Their search for the weight repeats the whole attack for each value ("Towards Evaluating the Robustness of
Neural Networks", 2017, section VI); here it moves at every step, as the multiplier of a constraint does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.detector_aware import Ascent, AttackProblem, BestTracker, ScoreGradientAttack
from robust_ext.attacks._common.objectives import OBJECTIVES
from robust_ext.attacks._common.rows import over_rows
from robust_ext.core.settings import setting, settings_class
from robust_ext.models.wrapping import PaddedClasses

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
        choices=("ce", "margin", "dlr", "targeted-dlr"),
    )
    alpha: float = setting(default=1.0, help="Weight of the detector at the first step.", above=0)

    def ascent(self, problem: AttackProblem, tracker: BestTracker) -> Ascent:
        """See :meth:`DetectorAwareAttack.ascent`."""
        objective = OBJECTIVES[self.loss]
        loss = objective.of_kind(problem.goal)
        padded = PaddedClasses(nn.Identity(), classes=objective.minimum_classes)
        alpha = problem.inputs.new_full((len(problem.inputs),), self.alpha)
        unit = torch.full_like(alpha, torch.nan)

        def advance(points: Tensor, number: int) -> tuple[Tensor, Tensor]:
            nonlocal alpha, unit
            found, value, of_loss, of_score = tracker.differentiate(points, lambda z, labels: loss(padded(z), labels))
            ratio = of_loss.flatten(1).norm(dim=1) / of_score.flatten(1).norm(dim=1)
            unit = torch.where(unit.isnan() & (ratio > 0) & torch.isfinite(ratio), ratio, unit)
            weight = alpha * unit.nan_to_num(nan=1.0)
            shown = (value - weight * found.score_margin.clamp_min(0)).nan_to_num(nan=-torch.inf)
            follows = torch.where(found.misclassified, 1.0, 1 / _FACTOR)
            alpha = (alpha * torch.where(found.passed, follows, _FACTOR)).clamp(_SMALLEST, _LARGEST)
            active = over_rows(torch.where(found.score_margin >= 0, weight, 0), points)
            return shown, of_loss - active * of_score

        return advance
