"""Projected ascent on a loss that does not state success, which is looked for beside it; for attacks that match."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.attacks._common.best_tracker import AttackProblem, BestTracker
from robust_ext.attacks._common.detector_aware import DetectorAwareAttack
from robust_ext.attacks.native import Step
from robust_ext.core.settings import setting, settings_class

MatchingLoss = Callable[[Tensor], tuple[Tensor, Tensor]]


@settings_class
class MatchingAttack(DetectorAwareAttack):
    """An attack that makes rows look like their references; a subclass has one method, :meth:`loss`.

    Steps are of signs for linf, and along the gradient's direction for l2 and l1.

    The detector's score is not followed, and needs no gradients; points are evaluated beside the ascent, and of those
    that were, the misclassified one of lowest score margin is kept, a success if there was one (the one of highest
    margin where none was misclassified).
    """

    traits = replace(DetectorAwareAttack.traits, references=True)

    reference: str = setting(
        default="nearest",
        help='Which of several references a row is pulled to: the ``"nearest"`` to the input in what is matched, or '
        'the ``"mean"`` of theirs.',
        choices=("nearest", "mean"),
    )
    confidence: float = setting(
        default=0.0, help="Margin in logits above which the classifier's term is content.", minimum=0
    )
    check_every: int = setting(
        default=1,
        help="How often points are evaluated, in steps. Where the detector is as cheap as what is matched, 1.",
        minimum=1,
    )

    @abstractmethod
    def loss(self, problem: AttackProblem) -> MatchingLoss:
        """From points ``(N, ...)`` to a loss ``(N,)`` and its gradient ``(N, ...)``."""

    def attack(self, problem: AttackProblem) -> Tensor:
        """Ascend from each start; the start, every ``check_every``-th point after it and the last are evaluated."""
        loss, tracker = self.loss(problem), BestTracker(problem, name=self.name, samples=self.calls)
        length = self.step_length(problem)
        for restart in range(self.restarts):
            points = problem.start(self.start, restart=restart)
            for number in range(self.steps):
                if number % self.check_every == 0:
                    tracker.evaluate(points)
                value, gradient = loss(points)
                if problem.watch is not None:
                    at, total = restart * self.steps + number, self.restarts * self.steps
                    problem.watch(Step(number=at, total=total, points=points, loss=value, gradient=gradient))
                points = problem.step(points, gradient, length=length)
            tracker.evaluate(points)
        return tracker.result()

    @property
    def calls(self) -> int:
        """Calls of classifier and detector that are averaged where points are evaluated."""
        return self.samples

    def choose_reference(self, groups: list[Tensor], own: Tensor) -> Tensor:
        """What to match, from what each row's references look like, R times ``(N, F)``, and the inputs ``(N, F)``."""
        every = torch.stack(groups, 1)
        if self.reference == "mean":
            return every.mean(1)
        nearest = (every - own[:, None]).square().sum(2).argmin(1)
        return every[torch.arange(len(every), device=every.device), nearest]
