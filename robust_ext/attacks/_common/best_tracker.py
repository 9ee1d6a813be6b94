"""The problem of a detector-aware attack, and trackers of the best points."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks._common.objectives import OBJECTIVES, Loss, margin
from robust_ext.attacks._common.rows import (
    NO_GRADIENTS,
    broken,
    gradient_of,
    l2_normalize,
    over_rows,
    project,
    random_start,
)
from robust_ext.attacks.native import Batch
from robust_ext.core.errors import AttackRefusedError, warn
from robust_ext.models.defended import Defended


class BestPoints:
    """Keeps one point a row: a misclassified one before one that is not, and of two alike the one of higher loss.

    Of two that are equally good the first stays. Points whose logits are not finite have a loss of ``-inf`` and, unless
    the search aims, count as misclassified: any other misclassified point goes before them. ``points`` are the inputs
    at first, with ``loss`` ``-inf``; ``solved`` is whether they are misclassified, or hit their aim.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, *, loss: str, targeted: bool) -> None:
        self._loss = OBJECTIVES[loss].of_kind(targeted=targeted)
        self._labels, self._targeted = labels, targeted
        self.points = inputs.clone()
        self.loss = inputs.new_full((len(inputs),), -torch.inf)
        self.solved = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)

    def update(self, points: Tensor, logits: Tensor, *, closed: Tensor | None = None) -> Tensor:
        """Take over what is better, except in ``closed`` rows ``(N,)``; the loss ``(N,)``, ``-inf`` if no number."""
        finite = torch.isfinite(logits).all(1)
        loss = self._loss(logits, self._labels).to(self.loss.dtype).where(finite, -torch.inf)
        solved = (logits.argmax(1) == self._labels) == self._targeted
        solved = torch.where(finite, solved, broken(logits, targeted=self._targeted))
        self._take(points, loss, solved, closed)
        return loss

    def merge(self, other: BestPoints) -> None:
        """Take over what is better among the points of another search for the same rows."""
        self._take(other.points, other.loss, other.solved, None)

    def _take(self, points: Tensor, loss: Tensor, solved: Tensor, closed: Tensor | None) -> None:
        better = (solved & ~self.solved) | ((solved == self.solved) & (loss > self.loss))
        if closed is not None:
            better &= ~closed
        self.points = torch.where(over_rows(better, points), points, self.points)
        self.loss = torch.where(better, loss, self.loss)
        self.solved = torch.where(better, solved, self.solved)


# A margin below this share of the largest logit may be gone in a batch of another size.
_ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class AttackProblem(Batch):
    """A batch of at least one row, checked, with the detector, the points to imitate ``(N, R, ...)`` and generators.

    There is one CPU generator a row: the first rows have the same ones whatever comes after them.
    """

    defended: Defended
    references: Tensor | None
    streams: list[torch.Generator]

    def start(self, how: str, *, restart: int = 0) -> Tensor:
        """Return a run's first points, ``(N, ...)``: random, or the inputs in the first run of ``"input"``."""
        if how == "input" and restart == 0:
            return self.inputs.clone()
        return random_start(self.inputs, self.threat_model, self.streams)

    def step(self, points: Tensor, direction: Tensor, *, length: float, kind: str = "") -> Tensor:
        """Go along a direction ``(N, ...)`` of any length, and back to the nearest point that the threat model allows.

        ``"sign"``: ``length``, in units of the inputs, in every value. ``"l2"``: a Euclidean length of ``length``; for
        linf times the root of the number of values, which is the length of a step of signs. Left out: ``"sign"`` for
        linf, ``"l2"`` for the other norms. Rows of zeros stay where they are.
        """
        linf, flat = self.threat_model.norm == "linf", direction.flatten(1)
        if kind == "sign" or (not kind and linf):
            moved = flat.sign()
        else:
            moved = l2_normalize(flat)
            if linf:
                length *= flat.shape[1] ** 0.5
        return project(points + moved.view(points.shape) * length, self.inputs, self.threat_model)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Outputs of classifier and detector for points, averaged over calls; each ``(N,)``.

    ``score_margin`` is the score less its threshold, see :meth:`Defended.both`; ``margin`` is by how much a row is
    classified as the attack aims; ``passed`` is whether the detector accepts it.
    """

    score_margin: Tensor
    margin: Tensor
    misclassified: Tensor
    passed: Tensor

    @property
    def success(self) -> Tensor:
        """Misclassified and let pass, bool ``(N,)``."""
        return self.misclassified & self.passed


class BestTracker:
    """The queries of one attack on one batch, and the best point of each row.

    Among the points where a row is misclassified the one of lowest score margin is kept, so a success wherever there
    was one; successes whose margin is more than rounding go before those where it is not. Where there is no success, a
    point whose logits are not finite is kept, unless the attack aims, and where a row never was misclassified, the
    point of highest margin. Points with a score of NaN are not; a row that has no others keeps its input. ``samples``
    calls of classifier and detector are averaged.
    """

    def __init__(self, problem: AttackProblem, *, name: str, samples: int) -> None:
        self._problem, self._name, self._samples = problem, name, samples
        self._best = problem.inputs.clone()
        self._level = torch.full((len(problem.inputs),), -1, dtype=torch.int64, device=problem.inputs.device)
        self._merit = torch.full_like(problem.inputs.flatten(1)[:, 0], -torch.inf)
        self._rejected = torch.zeros_like(self._level, dtype=torch.bool)
        self._guided = torch.zeros_like(self._rejected)

    def evaluate(self, points: Tensor) -> Prediction:
        """Query points ``(N, ...)`` without gradients, by ``samples`` forward passes. The best are kept."""
        with torch.no_grad():
            calls = [self._problem.defended.both(points.clone()) for _ in range(self._samples)]
        return self._keep(points, _mean([logits for logits, _ in calls]), _mean([score for _, score in calls]))

    def differentiate(self, points: Tensor, loss: Loss) -> tuple[Prediction, Tensor, Tensor, Tensor]:
        """The prediction, the classifier's loss ``(N,)``, the gradients ``(N, ...)`` of that loss and of the score.

        One forward and two backward passes for each of the ``samples``. The best points are kept. An AttackRefusedError
        where one of the two has no gradients.
        """
        calls: list[tuple[Tensor, ...]] = []
        for _ in range(self._samples):
            with torch.enable_grad():
                x = points.detach().clone().requires_grad_(True)
                logits, score = self._problem.defended.both(x)
                value = loss(logits, self._problem.labels)
                of_loss = gradient_of(value, x, no_classifier_gradients(self._name), keep=True)
                missing = no_score_gradients(self._name, self._problem.defended, "is missing")
                of_score = gradient_of(score, x, missing)
            calls.append((logits.detach(), score.detach(), value.detach(), of_loss, of_score))
        logits, score, value, of_loss, of_score = (_mean(list(parts)) for parts in zip(*calls, strict=True))
        prediction = self._keep(points, logits, score)
        self._rejected |= ~prediction.passed
        self._guided |= ~prediction.passed & (of_score.flatten(1).abs().amax(1) > 0)
        return prediction, value, of_loss, of_score

    def result(self) -> Tensor:
        """The best points ``(N, ...)``; an error where each row was rejected, with gradients of zero where it was."""
        stuck = self._rejected & ~self._guided & (self._level < 2)
        if bool(stuck.all()):
            raise no_score_gradients(self._name, self._problem.defended, "is zero wherever it rejects")
        if bool(stuck.any()):
            warn(f"{self._name}: the gradient of the detector's score was zero at every rejected point of some rows")
        return self._best

    def _keep(self, points: Tensor, logits: Tensor, score: Tensor) -> Prediction:
        problem = self._problem
        gained = margin(logits, problem.labels)
        gained = -gained if problem.targeted else gained
        known = torch.isfinite(logits).all(1) & ~score.isnan()
        misclassified = ((logits.argmax(1) == problem.labels) == problem.targeted) & known
        # A score at the threshold itself is let pass, which the inverted test rejects.
        passed = (score < 0 if problem.defended.inverted else score <= 0) & known
        prediction = Prediction(score_margin=score, margin=gained, misclassified=misclassified, passed=passed)
        solid = prediction.success & (gained > _ROUNDING * logits.abs().amax(1))
        # Not misclassified, misclassified, not finite, success, beyond rounding.
        level = torch.where(known, misclassified.long() + 2 * prediction.success + solid, -1)
        level = torch.where(broken(logits, targeted=problem.targeted), 2, level)
        merit = torch.where(misclassified, -score, gained).to(self._merit.dtype)
        better = (level > self._level) | ((level == self._level) & (merit > self._merit))
        self._best = torch.where(over_rows(better, points), points.detach(), self._best)
        self._level, self._merit = torch.where(better, level, self._level), torch.where(better, merit, self._merit)
        return prediction


def no_classifier_gradients(name: str) -> AttackRefusedError:
    """The refusal of a classifier without gradients."""
    return AttackRefusedError(f"{name}: the classifier {NO_GRADIENTS}")


def no_score_gradients(name: str, defended: Defended, what: str) -> AttackRefusedError:
    """The refusal of a detector whose score has no gradients, or none that help."""
    return AttackRefusedError(
        f"{name} follows the gradient of the detector's score, and that of {type(defended.detector).__name__} {what}; "
        "give it a differentiable approximation (BPDA), or choose an attack that needs none: one that queries "
        "decisions only, or robust_ext:FeatureMatching"
    )


def _mean(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)
