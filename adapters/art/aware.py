"""This project's attacks that know the detector, as ART attacks on classifiers with a detector."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.art.native import NativeEvasionAttack
from robust_ext.adapters.aware import check_references, find_defended, search_defended, settings_of
from robust_ext.attacks import joint_loss, orthogonal
from robust_ext.attacks._common.detector_aware import DetectorAwareAttack
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.errors import InvalidArgumentError

_EXPECTED = "robust_ext.estimators.DefendedPyTorchClassifier"


class AwareEvasionAttack(NativeEvasionAttack):
    """Base of the attacks on a classifier and its detector; a subclass says which attack of this project it is.

    The estimator is a :class:`robust_ext.estimators.DefendedPyTorchClassifier`, or any ``PyTorchClassifier`` whose
    network holds a :class:`robust_ext.models.defended.Defended` and nothing that changes inputs or logits around it:
    preprocessing has to lie inside the classifier.

    Labels are the classifier's own, without that of being rejected (one-hot labels may have its column); left out,
    they are the classifier's predictions whether they are rejected or not. Searched are points that are misclassified
    and let pass; count them with ``estimator.outcomes``. With random starts or noise, results depend on the batch size.

    Attributes:
        core: The attack's class in this project.
    """

    core: ClassVar[type[DetectorAwareAttack]]

    def native(self) -> DetectorAwareAttack:
        """The attack with these settings."""
        return self.core(**settings_of(self, self.core))

    def _search_batch(
        self,
        attack: NativeAttack,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        *,
        references: Tensor | None,
        **ways: Any,
    ) -> Tensor:
        return search_defended(attack, module, inputs, labels, expected=_EXPECTED, references=references, **ways)

    def _classes(self) -> int:
        classes = super()._classes()
        return classes - (find_defended(self.estimator.model, expected=_EXPECTED).exposure == "reject")

    def _check_params(self) -> None:
        super()._check_params()
        find_defended(self.estimator.model, expected=_EXPECTED)


class ImitatingEvasionAttack(AwareEvasionAttack):
    """Base of those that imitate reference points, which are a keyword of :meth:`generate`."""

    def generate(self, x: Any, y: Any = None, *, references: Any = None, **kwargs: Any) -> Any:
        """Perturb a batch, see :meth:`NativeEvasionAttack.generate`.

        Args:
            x: Inputs ``(N, ...)`` within the estimator's ``clip_values``; not changed.
            y: Labels, one-hot or indices ``(N,)``: the true classes, or the classes to aim at. None: the
                classifier's predictions.
            references: Clean points of the classes that inputs are to be taken for (the class aimed at, or any but
                their own), which the detector lets pass: floating point ``(N, R, ...)``, or ``(R, ...)`` for all
                inputs.
            **kwargs: There are none.

        Returns:
            float32 array ``(N, ...)`` in the ball and within the clip values.

        Raises:
            ValueError: There are no references, or an argument is not accepted.
        """
        if kwargs:
            raise InvalidArgumentError("generate", f"the keyword {next(iter(kwargs))!r}", "x, y and references alone")
        points = None if references is None else torch.from_numpy(np.array(references, dtype=np.float32))
        return self._generate(x, y, references=points)

    def _groups(self, references: Tensor | None, inputs: Tensor, bounds: tuple[float, float]) -> Tensor | None:
        return check_references(references, inputs, bounds=bounds)


class SelectivePGD(AwareEvasionAttack):
    """Selective PGD, see :class:`robust_ext.attacks.orthogonal.SelectivePGD`.

    Args:
        estimator: A ``DefendedPyTorchClassifier``.
        norm: ``np.inf``, ``"inf"``, 2 or 1.
        eps: At least 0, in units of the inputs.
        steps: In each run, at least 1.
        step_size: Relative to ``eps``.
        restarts: Runs from starts of their own.
        loss: Of the classifier: ``"margin"`` or ``"ce"``.
        confidence: Margin in logits from which a row counts as misclassified.
        step: ``"l2"``, the gradient divided by its length, or ``"sign"``, for linf only.
        decay: Whether the step size falls to zero over a run.
        start: ``"random"`` or ``"input"``.
        samples: Calls that are averaged, for random detectors.
        targeted: Whether to aim at the labels.
        batch_size: How many samples are attacked together.
        seed: Of all draws, the same in every call; None: what ``np.random.seed`` makes of them.
        summary_writer: As in all of ART; updated after each step.
        verbose: Whether to show a progress bar.
    """

    core: ClassVar[type[DetectorAwareAttack]] = orthogonal.SelectivePGD
    attack_params: ClassVar[list[str]] = [
        *AwareEvasionAttack.attack_params,
        "steps",
        "step_size",
        "restarts",
        "loss",
        "confidence",
        "step",
        "decay",
        "start",
        "samples",
    ]

    def __init__(
        self,
        estimator: Any,
        *,
        norm: float | str = np.inf,
        eps: float = 0.3,
        steps: int = 1000,
        step_size: float = 0.1,
        restarts: int = 1,
        loss: str = "margin",
        confidence: float = 0.0,
        step: str = "l2",
        decay: bool = True,
        start: str = "random",
        samples: int = 1,
        targeted: bool = False,
        batch_size: int = 32,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None:
        super().__init__(
            estimator,
            norm=norm,
            eps=eps,
            targeted=targeted,
            batch_size=batch_size,
            seed=seed,
            summary_writer=summary_writer,
            verbose=verbose,
        )
        self.steps = steps
        self.step_size = step_size
        self.restarts = restarts
        self.loss = loss
        self.confidence = confidence
        self.step = step
        self.decay = decay
        self.start = start
        self.samples = samples
        self._check_params()


class OrthogonalPGD(SelectivePGD):
    """Orthogonal PGD, see :class:`robust_ext.attacks.orthogonal.OrthogonalPGD`; for linf and l2.

    Arguments are those of :class:`SelectivePGD`.
    """

    core = orthogonal.OrthogonalPGD


class JointLoss(AwareEvasionAttack):
    """Joint loss, see :class:`robust_ext.attacks.joint_loss.JointLoss`.

    Args:
        estimator: A ``DefendedPyTorchClassifier``.
        norm: ``np.inf``, ``"inf"``, 2 or 1.
        eps: At least 0, in units of the inputs.
        steps: In each run, at least 1.
        restarts: Runs, and so values of alpha that can be tried.
        loss: Of the classifier, by a name of :data:`robust_ext.attacks._common.objectives.OBJECTIVES`.
        alpha: Weight of the detector in the first run, above 0.
        step_size: Relative to ``eps``.
        step: ``"l2"``, the gradient divided by its length, or ``"sign"``, for linf only.
        decay: Whether the step size falls to zero over a run.
        start: ``"random"`` or ``"input"``.
        samples: Calls that are averaged, for random detectors.
        targeted: Whether to aim at the labels.
        batch_size: How many samples are attacked together.
        seed: Of all draws, the same in every call; None: what ``np.random.seed`` makes of them.
        summary_writer: As in all of ART; updated after each step.
        verbose: Whether to show a progress bar.
    """

    core = joint_loss.JointLoss
    attack_params: ClassVar[list[str]] = [
        *AwareEvasionAttack.attack_params,
        "steps",
        "restarts",
        "loss",
        "alpha",
        "step_size",
        "step",
        "decay",
        "start",
        "samples",
    ]

    def __init__(
        self,
        estimator: Any,
        *,
        norm: float | str = np.inf,
        eps: float = 0.3,
        steps: int = 100,
        restarts: int = 10,
        loss: str = "margin",
        alpha: float = 1.0,
        step_size: float = 0.2,
        step: str = "l2",
        decay: bool = True,
        start: str = "random",
        samples: int = 1,
        targeted: bool = False,
        batch_size: int = 32,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None:
        super().__init__(
            estimator,
            norm=norm,
            eps=eps,
            targeted=targeted,
            batch_size=batch_size,
            seed=seed,
            summary_writer=summary_writer,
            verbose=verbose,
        )
        self.steps = steps
        self.restarts = restarts
        self.loss = loss
        self.alpha = alpha
        self.step_size = step_size
        self.step = step
        self.decay = decay
        self.start = start
        self.samples = samples
        self._check_params()
