"""Joint loss: the classifier's loss less the detector's excess, with a weight that each row searches for itself.

Source: Carlini and Wagner, "Adversarial Examples Are Not Easily Detected: Bypassing Ten Detection Methods" (2017),
section 2.3; the search for the weight is that of their "Towards Evaluating the Robustness of Neural Networks" (2017),
section VI.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.best_tracker import Queries, Task
from robust_ext.attacks._common.detector_aware import AwareAttack, check_flag
from robust_ext.attacks._common.detector_aware_steps import STARTS, STEPS, start_of, step_along
from robust_ext.attacks._common.objectives import Loss, find_objective
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Step
from robust_ext.core.threat import NORMS
from robust_ext.core.validation import check_choice, check_integer, check_number
from robust_ext.models.padded import PaddedClasses

# What a weight is multiplied or divided by while only one end of its interval is known.
_FACTOR = 10.0


class JointLoss(AwareAttack):
    """Maximises ``loss - alpha x max(excess, 0)``, with an alpha for each row that is bisected over the restarts.

    After a run without a success alpha rises where the run's best point is rejected, and falls where it passes and is
    not misclassified: by factors of ten at first, by geometric means once both ends are known. Alpha is in units of the
    ratio of the two gradients' lengths where the row first has both. After a run with a success it stays. What is kept
    is the misclassified point of lowest excess of all runs, a success if there was one; the one of highest margin where
    none was misclassified.

    Each step sends every row forward once and back twice for each of the ``samples``; the end of each run takes one
    more forward pass for each.

    Steps are along the gradient and shrink, by default: rows then settle where the excess is about to rise above 0.
    Steps of signs jump over that edge in every value at once. Targets need a detector with gradients. For targeted
    attacks the labels are the classes to aim at.

    Args:
        steps: In each run, at least 1.
        restarts: Runs, and so values of alpha that can be tried.
        loss: Of the classifier, by a name of :data:`.objectives.OBJECTIVES`; targets with fewer
            classes than it needs are padded.
        alpha: In the first run, above 0.
        step_size: Relative to epsilon: Euclidean, and for linf times the root of the number of values, or with
            ``step="sign"`` in each value.
        step: ``"l2"``, the gradient divided by its length, or ``"sign"``, for linf only.
        decay: Whether the step size falls to zero over a run, linearly.
        start: ``"random"`` or ``"input"``.
        samples: Calls of classifier and detector whose answers and gradients are averaged, for random ones.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> JointLoss(steps=50, restarts=5).name
        'JointLoss'
    """

    name = "JointLoss"

    def __init__(
        self,
        *,
        steps: int = 100,
        restarts: int = 10,
        loss: str = "margin",
        alpha: float = 1.0,
        step_size: float = 0.2,
        step: str = "l2",
        decay: bool = True,
        start: str = "random",
        samples: int = 1,
    ) -> None:
        find_objective(loss)
        self.settings = {
            "steps": check_integer("steps", steps, minimum=1),
            "restarts": check_integer("restarts", restarts, minimum=1),
            "loss": loss,
            "alpha": check_number("alpha", alpha, minimum=0, open_minimum=True),
            "step_size": check_number("step_size", step_size, minimum=0, open_minimum=True),
            "step": check_choice("step", step, STEPS),
            "decay": check_flag("decay", decay),
            "start": check_choice("start", start, STARTS),
            "samples": check_integer("samples", samples, minimum=1),
        }
        self.traits = AttackTraits(
            batching="full",
            detector=True,
            failure="best",
            seeds="generator",
            norms=("linf",) if step == "sign" else NORMS,
        )

    def solve(self, task: Task) -> Tensor:
        """See :meth:`AwareAttack.solve`."""
        chosen = self.settings
        queries = Queries(task, name=self.name, samples=chosen["samples"])
        weights = _Weights(task.inputs, chosen["alpha"])
        for restart in range(chosen["restarts"]):
            points = start_of(task, start=chosen["start"], restart=restart)
            weights.learn(*self._run(task, queries, weights, points, restart))
        return queries.result()

    def _run(
        self, task: Task, queries: Queries, weights: _Weights, points: Tensor, restart: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One ascent: whether each row succeeded, and whether its best point is misclassified and passes."""
        chosen = self.settings
        steps, total = chosen["steps"], chosen["restarts"] * chosen["steps"]
        loss = _loss(chosen["loss"], targeted=task.targeted)
        highest = torch.full_like(points.flatten(1)[:, 0], -torch.inf)
        solved = torch.zeros_like(highest, dtype=torch.bool)
        misclassified, passed = solved, solved
        for number in range(steps):
            answer, value, of_loss, of_excess = queries.differentiate(points, loss)
            alpha = weights.of(of_loss.flatten(1), of_excess.flatten(1))
            value = (value - alpha * answer.excess.clamp_min(0)).nan_to_num(nan=-torch.inf)
            felt = torch.where(answer.excess >= 0, alpha, 0).view(-1, *[1] * (points.dim() - 1))
            gradient = of_loss - felt * of_excess
            if task.watch is not None:
                task.watch(Step(restart * steps + number, total, points, value, gradient))
            better = value > highest
            highest = torch.where(better, value, highest)
            misclassified = torch.where(better, answer.misclassified, misclassified)
            passed = torch.where(better, answer.passed, passed)
            solved = solved | answer.success
            size = chosen["step_size"] * (1 - number / steps if chosen["decay"] else 1)
            points = step_along(task, points, gradient, size=size, kind=chosen["step"])
        return solved | queries.judge(points).success, misclassified, passed


class _Weights:
    """The weight of each row, and the interval in which it is looked for."""

    def __init__(self, inputs: Tensor, alpha: float) -> None:
        self._alpha = inputs.new_full((len(inputs),), alpha)
        self._low, self._high = torch.zeros_like(self._alpha), torch.full_like(self._alpha, torch.inf)
        self._unit = torch.full_like(self._alpha, torch.nan)

    def of(self, of_loss: Tensor, of_excess: Tensor) -> Tensor:
        """The weights ``(N,)``, in units that the first gradients ``(N, D)`` that are not zero settle."""
        ratio = of_loss.norm(dim=1) / of_excess.norm(dim=1)
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
    objective = find_objective(name)
    loss = objective.targeted if targeted else objective.untargeted
    padded = PaddedClasses(nn.Identity(), classes=objective.minimum_classes)
    return lambda logits, labels: loss(padded(logits), labels)
