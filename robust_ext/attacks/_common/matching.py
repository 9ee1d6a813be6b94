"""Attacks that make rows look like reference points of another class."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.attacks._common.detector_aware import Ascent, AttackProblem, BestTracker, DetectorAwareAttack
from robust_ext.attacks._common.rows import hits
from robust_ext.core.errors import AttackError, warn
from robust_ext.core.settings import setting, settings_class

MatchingLoss = Callable[[Tensor], tuple[Tensor, Tensor]]


def averaged(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the means of losses and gradients, which are computed with gradients on."""
    with torch.enable_grad():
        values, gradients = zip(*parts, strict=True)
    return torch.stack(values).mean(0), torch.stack(gradients).mean(0)


@settings_class
class MatchingAttack(DetectorAwareAttack):
    """An attack that makes rows look like their references; a subclass has one method, :meth:`loss`.

    Steps are of signs for linf, and along the gradient's direction for l2 and l1.

    The detector's score is not followed, and needs no gradients; points are evaluated next to the ascent, and of those
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
        default=0.0, help="Margin in logits above which the classifier's term is satisfied.", minimum=0
    )
    check_every: int = setting(
        default=1,
        help="Steps between two evaluations of the points; 1 where the detector is cheap.",
        minimum=1,
    )

    @abstractmethod
    def loss(self, problem: AttackProblem) -> MatchingLoss:
        """From points ``(N, ...)`` to a loss ``(N,)`` and its gradient ``(N, ...)``."""

    def ascent(self, problem: AttackProblem, tracker: BestTracker) -> Ascent:
        """See :meth:`DetectorAwareAttack.ascent`; the tracker sees every ``check_every``-th point of a run."""
        loss = self.loss(problem)

        def advance(points: Tensor, number: int) -> tuple[Tensor, Tensor]:
            if number % self.check_every == 0:
                tracker.evaluate(points)
            return loss(points)

        return advance

    def gain(self, problem: AttackProblem, logits: Tensor) -> Tensor:
        """Return the margins by which rows are classified as wanted, up to the confidence, ``(N,)``."""
        return problem.goal.margin(logits, problem.labels).clamp_max(self.confidence)

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
            now = problem.defended.classifier(problem.inputs.clone())
        solved = hits(now, problem.labels, problem.goal)
        usable = torch.stack([hits(one, problem.labels, problem.goal) for one in logits], 1)
        lacking = ~solved & ~usable.any(1)
        if bool(lacking.any()):
            kind = "of the class aimed at" if problem.targeted else "of another class"
            kind = f"at which {problem.goal.words}" if problem.goal.ranks else kind
            advice = f"give references {kind}"
            # Others are few, and hosts attack in batches of a few rows.
            if not (problem.targeted or problem.goal.ranks) and bool((lacking | solved).all()):
                raise AttackError(f"{self.name}: the classifier puts none of the references {kind}; {advice}")
            warn(f"{self.name}: for some inputs the classifier puts none of the references {kind}; {advice}")
        usable |= ~usable.any(1, keepdim=True)
        every = torch.stack(groups, 1)
        if self.reference == "mean":
            return (every * usable[:, :, None]).sum(1) / usable.sum(1, keepdim=True)
        nearest = (every - own[:, None]).square().sum(2).masked_fill(~usable, torch.inf).argmin(1)
        return every[torch.arange(len(every), device=every.device), nearest]
