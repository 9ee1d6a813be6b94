"""What the attacks on a classifier together with its detector have in common: settings, and the checks before them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from robust_ext.attacks._common.best_tracker import AttackProblem, no_score_gradients
from robust_ext.attacks._common.rows import STARTS, check_batch, row_streams
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.native import Batch, NativeAttack
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
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
