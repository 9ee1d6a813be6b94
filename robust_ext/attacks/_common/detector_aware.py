"""Settings and checks shared by attacks on a classifier with its detector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.attacks._common.best_tracker import AttackProblem, BestTracker, no_score_gradients
from robust_ext.attacks._common.rows import STARTS, check_batch, row_streams
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.native import Batch, NativeAttack, Step
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError, warn
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.target import Target


@settings_class
class DetectorAwareAttack(NativeAttack):
    """An attack on a classifier and its detector; a subclass has one method, :meth:`attack`.

    Attributes:
        uses_scores: Whether it follows the gradient of the detector's score.
    """

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
            return self.attack(problem)

    @abstractmethod
    def attack(self, problem: AttackProblem) -> Tensor:
        """Candidates ``(N, ...)`` for a problem that is checked; global generators are seeded."""

    def step_length(self, problem: AttackProblem, *, share: float = 1.0) -> float:
        """Length of a step in units of the inputs, see :meth:`AttackProblem.step`; ``share`` of the whole."""
        if self.step_size is not None:
            return self.step_size * share
        return self.rel_step_size * share * problem.threat_model.epsilon

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
        """The points after step ``number`` of a run, see the class."""
        length = self.step_length(problem, share=1 - number / self.steps if self.decay else 1)
        return problem.step(points, direction, length=length, kind=self.step)


MatchingLoss = Callable[[Tensor], tuple[Tensor, Tensor]]


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
