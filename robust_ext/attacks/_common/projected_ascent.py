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
from robust_ext.core.errors import AttackError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.warning import warn

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
        help="Which of several references of another class a row is pulled to: the "
        '``"nearest"`` to the input in what is matched, or the ``"mean"`` of theirs.',
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

    def choose_reference(self, problem: AttackProblem, groups: list[Tensor], own: Tensor) -> Tensor:
        """Choose what each row matches among its references of another class (where it aims, of that class).

        The class is the classifier's. A row without such a reference takes what it has; an AttackError where no row
        that is to be moved away from its class has any. One pass of the inputs and of each reference.

        Args:
            problem: With references ``(N, R, ...)``.
            groups: What the references look like, R times ``(N, F)``.
            own: What the inputs look like, ``(N, F)``.
        """
        assert problem.references is not None
        with torch.no_grad():
            logits = [problem.defended.classifier(points.clone()) for points in problem.references.unbind(1)]
            # Logits that are no numbers are of no class.
            classes = [one.argmax(1).where(one.isfinite().all(1), -1) for one in logits]
            now = problem.defended.classifier(problem.inputs.clone()).argmax(1)
        solved = (now == problem.labels) == problem.targeted
        usable = (torch.stack(classes, 1) == problem.labels[:, None]) == problem.targeted
        lacking = ~solved & ~usable.any(1)
        if bool(lacking.any()):
            kind = "of the class aimed at" if problem.targeted else "of another class"
            advice = f"give references {kind}"
            # Those of the class aimed at are few, and hosts attack in batches of a few rows.
            if not problem.targeted and bool((lacking | solved).all()):
                raise AttackError(f"{self.name}: the classifier puts none of the references {kind}; {advice}")
            warn(f"{self.name}: for some inputs the classifier puts none of the references {kind}; {advice}")
        usable |= ~usable.any(1, keepdim=True)
        every = torch.stack(groups, 1)
        if self.reference == "mean":
            return (every * usable[:, :, None]).sum(1) / usable.sum(1, keepdim=True)
        nearest = (every - own[:, None]).square().sum(2).masked_fill(~usable, torch.inf).argmin(1)
        return every[torch.arange(len(every), device=every.device), nearest]
