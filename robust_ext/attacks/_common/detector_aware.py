"""Attacks on a classifier with its detector: their problem, the best points, shared settings and the loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.attacks._common.objectives import Loss
from robust_ext.attacks._common.rows import (
    NO_GRADIENTS,
    STARTS,
    check_batch,
    gradient_of,
    l2_normalize,
    over_rows,
    project,
    random_start,
    row_streams,
)
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.native import Batch, NativeAttack
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, warn
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.target import Target
from robust_ext.models.defended import Defended

# A margin below this share of the largest logit may be gone in a batch of another size.
_ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class AttackProblem(Batch):
    """A batch of at least one row, checked, with the detector, the points to imitate ``(N, R, ...)`` and generators.

    There is one CPU generator a row: the first rows have the same ones in a longer batch.
    """

    defended: Defended
    references: Tensor | None
    streams: list[torch.Generator]


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
        gained = problem.goal.margin(logits, problem.labels)
        finite = torch.isfinite(logits).all(1)
        known = finite & ~score.isnan()
        misclassified = problem.goal.adversarial(logits, problem.labels) & known
        # A score at the threshold itself is let pass, which the inverted test rejects.
        passed = (score < 0 if problem.defended.inverted else score <= 0) & known
        prediction = Prediction(score_margin=score, margin=gained, misclassified=misclassified, passed=passed)
        success = misclassified & passed
        solid = success & (gained > _ROUNDING * logits.abs().amax(1))
        # Not misclassified, misclassified, not finite, success, beyond rounding.
        level = torch.where(known, misclassified.long() + 2 * success + solid, -1)
        level = torch.where(finite | problem.targeted, level, 2)
        merit = torch.where(misclassified, -score, gained).to(self._merit.dtype)
        better = (level > self._level) | ((level == self._level) & (merit > self._merit))
        self._best = torch.where(over_rows(better, points), points.detach(), self._best)
        self._level, self._merit = torch.where(better, level, self._level), torch.where(better, merit, self._merit)
        return prediction


Ascent = Callable[[Tensor, int], tuple[Tensor, Tensor]]


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


@settings_class
class DetectorAwareAttack(NativeAttack):
    """An attack on a classifier and its detector; a subclass has one method, :meth:`ascent`.

    Attributes:
        uses_scores: Whether it follows the gradient of the detector's score.
    """

    ranks = True
    traits = AttackTraits(batching="full", detector=True, failure="best", seeds="generator")
    uses_scores: ClassVar[bool] = False

    steps: int = setting(default=100, help="Steps of each run.", minimum=1, trial=20, art="max_iter")
    rel_step_size: float = setting(default=0.1, help="Step size relative to epsilon.", above=0, foolbox="rel_stepsize")
    step_size: float | None = setting(
        default=None,
        help="Step size in the units of the inputs; it goes before ``rel_step_size``.",
        above=0,
        foolbox="abs_stepsize",
        art="eps_step",
    )
    restarts: int = setting(default=1, help="Runs from starts of their own.", minimum=1, art="num_random_init")
    start: str = setting(
        default="random",
        help='``"random"``: uniform in the ball, clipped to the bounds. ``"input"``: the inputs in the first run, '
        "random points in those that follow.",
        choices=STARTS,
        foolbox="random_start",
    )
    samples: int = setting(default=1, help="Calls that are averaged, for random detectors and classifiers.", minimum=1)

    def candidates(self, batch: Batch) -> Tensor:
        """See :meth:`NativeAttack.candidates`.

        An AttackRefusedError where the target has no detector, no references where they are needed, or a detector whose
        score has no gradients where these are needed.
        """
        defended = batch.target.defended
        self.check(threat_model=batch.threat_model, detector=defended is not None)
        assert defended is not None
        if self.uses_scores and not defended.detector.differentiable:
            raise no_score_gradients(self.name, defended, "is declared useless (differentiable=False)")
        inputs, labels = check_batch(batch.target, batch.inputs, batch.labels, batch.threat_model)
        references = self._references(batch.target, inputs) if self.traits.references else None
        if not len(inputs):
            return inputs.clone()
        seed = draw_seed(batch.generator)
        given = {**vars(batch), "inputs": inputs, "labels": labels}
        streams = row_streams(len(inputs), batch.generator)
        problem = AttackProblem(defended=defended, references=references, streams=streams, **given)
        # Random detectors draw from the global generators.
        with seeded_globals(seed):
            return self._attack(problem)

    def _attack(self, problem: AttackProblem) -> Tensor:
        tracker = BestTracker(problem, name=self.name, samples=self.calls)
        advance, total, model = self.ascent(problem, tracker), self.restarts * self.steps, problem.threat_model
        for restart in range(self.restarts):
            at_input = self.start == "input" and restart == 0
            points = problem.inputs.clone() if at_input else random_start(problem.inputs, model, problem.streams)
            for number in range(self.steps):
                value, direction = advance(points, number)
                problem.show(restart * self.steps + number, total, points, value, direction)
                points = self.move(problem, points, direction, number=number)
            tracker.evaluate(points)
        return tracker.result()

    @abstractmethod
    def ascent(self, problem: AttackProblem, tracker: BestTracker) -> Ascent:
        """From points ``(N, ...)`` and the number of the step in its run to a loss ``(N,)`` and a direction.

        It shows the tracker which points to keep; the last point of each run is evaluated after it. Global generators
        are seeded.
        """

    @property
    def calls(self) -> int:
        """Calls of classifier and detector that are averaged where points are evaluated."""
        return self.samples

    def move(self, problem: AttackProblem, points: Tensor, direction: Tensor, *, number: int) -> Tensor:
        """Return the points after step ``number`` of a run: by signs for linf, along the direction for other norms."""
        return self._moved(problem, points, direction, signs=problem.threat_model.norm == "linf")

    def _moved(
        self, problem: AttackProblem, points: Tensor, direction: Tensor, *, signs: bool, share: float = 1.0
    ) -> Tensor:
        """Go a share of the step size, and back to the nearest point that the threat model allows.

        Rows of zeros stay. Steps that are not of signs are longer for linf, by the root of the number of values: as
        long as a step of signs.
        """
        size = self.rel_step_size * share * problem.threat_model.epsilon
        if self.step_size is not None:
            size = self.step_size * share
        flat = direction.flatten(1)
        if not signs and problem.threat_model.norm == "linf":
            size *= flat.shape[1] ** 0.5
        way = (flat.sign() if signs else l2_normalize(flat)).view(points.shape)
        return project(points + way * size, problem.inputs, problem.threat_model)

    def _references(self, target: Target, inputs: Tensor) -> Tensor:
        references = target.references
        if references is None:
            raise AttackRefusedError(
                f"{self.name} imitates reference points, and this target has none; set Target.references, or choose an "
                "attack that needs none, such as robust_ext:JointLoss"
            )
        shape = tuple(references.shape)
        if shape[:1] + shape[2:] != tuple(inputs.shape) or not shape[1]:
            expected = f"{len(inputs)} groups of at least one point, shape {(len(inputs), 'R', *inputs.shape[1:])}"
            raise InvalidArgumentError("target.references", f"shape {shape}", expected)
        return references.to(inputs.device, inputs.dtype)


@settings_class
class ScoreGradientAttack(DetectorAwareAttack):
    """An attack that follows the gradients of classifier and detector; its targets need a detector with gradients."""

    uses_scores: ClassVar[bool] = True

    step: str = setting(
        default="l2",
        help='``"l2"``, the gradient divided by its length; the step size is Euclidean, and for linf times the root of '
        'the number of values. Or ``"sign"``, for linf only, where it is that of each value.',
        choices=("l2", "sign"),
    )
    decay: bool = setting(
        default=True, help="Whether the step size falls to zero over a run, linearly, so that rows settle."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step == "sign":
            self._set("traits", replace(type(self).traits, norms=("linf",)))

    def move(self, problem: AttackProblem, points: Tensor, direction: Tensor, *, number: int) -> Tensor:
        """See :meth:`DetectorAwareAttack.move`."""
        share = 1 - number / self.steps if self.decay else 1.0
        return self._moved(problem, points, direction, signs=self.step == "sign", share=share)
