"""The questions of an attack that knows the detector, and the points it keeps."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks._common.objectives import Loss, margin
from robust_ext.attacks.native import Watch
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.threat import ThreatModel
from robust_ext.models.defended import Defended

logger = logging.getLogger(__name__)

# A margin below this share of the largest logit may be gone in a batch of another size.
_ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an attack is asked to do, checked.

    Args:
        defended: The classifier and its detector.
        references: Points to imitate, ``(N, R, ...)``, or None.
        inputs: float32 ``(N, ...)``, N at least 1.
        labels: int64 ``(N,)``: the true classes, or the classes to aim at.
        threat_model: The norm, epsilon and bounds.
        streams: One CPU generator a row: the first rows have the same ones whatever comes after them.
        targeted: Whether rows should be classified as their label instead of as anything else.
        watch: To be called after each step.
    """

    defended: Defended
    references: Tensor | None
    inputs: Tensor
    labels: Tensor
    threat_model: ThreatModel
    streams: list[torch.Generator]
    targeted: bool
    watch: Watch | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the classifier and the detector say of points, averaged over the calls.

    Args:
        logits: ``(N, K)``.
        excess: ``(N,)``.
        margin: By how much a row is classified as the attack wants it, ``(N,)``.
        misclassified: Whether it is, bool ``(N,)``.
        passed: Whether the detector lets it pass, bool ``(N,)``.
    """

    logits: Tensor
    excess: Tensor
    margin: Tensor
    misclassified: Tensor
    passed: Tensor

    @property
    def success(self) -> Tensor:
        """Misclassified and let pass, bool ``(N,)``."""
        return self.misclassified & self.passed


class Queries:
    """The questions of one attack on one batch, and the best point of each row.

    Among the points where a row is misclassified the one of lowest excess is kept, so a success wherever there was one;
    successes whose margin is more than rounding go before those where it is not. Where a row never was misclassified,
    the point of highest margin is kept. Points with answers of NaN are not; a row that has no others keeps its input.

    Args:
        task: What the attack is asked to do.
        name: Of the attack, for error messages.
        samples: Calls whose answers are averaged.
    """

    def __init__(self, task: Task, *, name: str, samples: int) -> None:
        self._task, self._name, self._samples = task, name, samples
        self._best = task.inputs.clone()
        self._level = torch.full((len(task.inputs),), -1, dtype=torch.int64, device=task.inputs.device)
        self._merit = torch.full_like(task.inputs.flatten(1)[:, 0], -torch.inf)
        self._rejected = torch.zeros_like(self._level, dtype=torch.bool)
        self._guided = torch.zeros_like(self._rejected)

    def judge(self, points: Tensor) -> Answer:
        """What is said of points ``(N, ...)``, without gradients; ``samples`` forward passes. The best are kept."""
        with torch.no_grad():
            calls = [self._task.defended.both(points.clone()) for _ in range(self._samples)]
        return self._keep(points, _mean([logits for logits, _ in calls]), _mean([excess for _, excess in calls]))

    def differentiate(self, points: Tensor, loss: Loss) -> tuple[Answer, Tensor, Tensor, Tensor]:
        """The answer, the classifier's loss ``(N,)`` and the gradients ``(N, ...)`` of that loss and of the excess.

        One forward and two backward passes for each of the ``samples``. The best points are kept.

        Args:
            points: ``(N, ...)``.
            loss: Of logits and labels, as :mod:`robust_ext.attacks._common.objectives` has them.

        Raises:
            AttackRefusedError: One of the two has no gradients.
        """
        calls: list[tuple[Tensor, ...]] = []
        for _ in range(self._samples):
            with torch.enable_grad():
                x = points.detach().clone().requires_grad_(True)
                logits, excess = self._task.defended.both(x)
                value = loss(logits, self._task.labels)
                of_loss = gradient_of(value, x, no_classifier_gradients(self._name), keep=True)
                missing = no_score_gradients(self._name, self._task.defended, "is missing")
                of_excess = gradient_of(excess, x, missing)
            calls.append((logits.detach(), excess.detach(), value.detach(), of_loss, of_excess))
        logits, excess, value, of_loss, of_excess = (_mean(list(parts)) for parts in zip(*calls, strict=True))
        answer = self._keep(points, logits, excess)
        self._rejected |= ~answer.passed
        self._guided |= ~answer.passed & (of_excess.flatten(1).abs().amax(1) > 0)
        return answer, value, of_loss, of_excess

    def result(self) -> Tensor:
        """The best points ``(N, ...)``.

        Raises:
            AttackRefusedError: In every row the detector rejected, and its gradient was zero at each such point.
        """
        stuck = self._rejected & ~self._guided & (self._level < 2)
        if bool(stuck.all()):
            raise AttackRefusedError(no_score_gradients(self._name, self._task.defended, "is zero wherever it rejects"))
        if bool(stuck.any()):
            logger.warning(
                "%s: the gradient of the detector's score was zero at every rejected point of %d of %d rows",
                self._name,
                int(stuck.sum()),
                len(stuck),
            )
        return self._best

    def _keep(self, points: Tensor, logits: Tensor, excess: Tensor) -> Answer:
        task = self._task
        gained = margin(logits, task.labels)
        gained = -gained if task.targeted else gained
        same = logits.argmax(1) == task.labels
        known = torch.isfinite(logits).all(1) & ~excess.isnan()
        misclassified = (same if task.targeted else ~same) & known
        # A score at the threshold itself is let pass, which the inverted test rejects.
        passed = (excess < 0 if task.defended.inverted else excess <= 0) & known
        answer = Answer(logits=logits, excess=excess, margin=gained, misclassified=misclassified, passed=passed)
        solid = answer.success & (gained > _ROUNDING * logits.abs().amax(1))
        level = torch.where(known, misclassified.long() + answer.success + solid, -1)
        merit = torch.where(misclassified, -excess, gained).to(self._merit.dtype)
        better = (level > self._level) | ((level == self._level) & (merit > self._merit))
        shape = (-1, *[1] * (points.dim() - 1))
        self._best = torch.where(better.view(shape), points.detach(), self._best)
        self._level, self._merit = torch.where(better, level, self._level), torch.where(better, merit, self._merit)
        return answer


def gradient_of(value: Tensor, x: Tensor, missing: str, *, keep: bool = False) -> Tensor:
    """The gradient of values ``(N,)`` with respect to their points; what is no number is taken for zero.

    Args:
        value: One number a row.
        x: The points ``(N, ...)``.
        missing: What to say where there is none.
        keep: Whether the graph is needed once more.

    Raises:
        AttackRefusedError: There is none.
    """
    gradient = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value.sum(), x, retain_graph=keep, allow_unused=True)
    if gradient is None:
        raise AttackRefusedError(missing)
    return gradient.nan_to_num(nan=0.0)


def no_classifier_gradients(name: str) -> str:
    """What to say of a classifier without gradients."""
    return (
        f"{name}: the classifier gives no gradients; attack it through a differentiable approximation (BPDA), or "
        "choose an attack without gradients"
    )


def no_score_gradients(name: str, defended: Defended, what: str) -> str:
    """What to say of a detector whose score has no gradients, or none that help."""
    return (
        f"{name} follows the gradient of the detector's score, and that of {type(defended.detector).__name__} {what}; "
        "give it a differentiable approximation (BPDA), or choose an attack that needs none: one that asks for "
        "decisions only, or robust_ext:FeatureMatching"
    )


def _mean(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)
