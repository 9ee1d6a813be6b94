"""This project's attacks that know the detector, as Foolbox attacks on models with a detector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import eagerpy as ep
from torch import Tensor

from robust_ext.adapters.aware import search_defended, settings_of
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.model import FoolboxModule
from robust_ext.adapters.foolbox.native import NORM_OF_DISTANCE, NativeFixedEpsilonAttack, torch_tensor
from robust_ext.attacks._common.detector_aware import DetectorAwareAttack
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.native import NativeAttack
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD
from robust_ext.core.errors import InvalidArgumentError

_distances: Any = foolbox.distances
_base = foolbox.attacks.base


class AwareFixedEpsilonAttack(NativeFixedEpsilonAttack):
    """Base of the attacks on a classifier and its detector; a subclass says which attack of this project it is.

    The model is a :class:`robust_ext.estimators.DefendedPyTorchModel`, or any Foolbox model of PyTorch whose network
    holds a :class:`robust_ext.models.defended.Defended` and nothing that changes inputs or logits around it: a wrapper
    with other bounds, or preprocessing outside the classifier, raises an error. Inputs are float32.

    Pass ``robust_ext.estimators.Undetected(labels)`` as criterion, and make the model with ``view="reject"``: plain
    labels would make Foolbox count being rejected as a success. Both are attacked alike, for points that are
    misclassified and let pass; labels, and the classes of ``TargetedMisclassification``, are the classifier's own.

    Attributes:
        core: The attack's class in this project.
        names: What its settings are called here, where they are called something else.
    """

    core: ClassVar[type[DetectorAwareAttack]]
    names: ClassVar[Mapping[str, str]] = {}

    def native(self) -> DetectorAwareAttack:
        """The attack with these settings."""
        return self.core(**settings_of(self, self.core, names=self.names))

    def _check(self) -> None:
        super()._check()
        norms = self.native().traits.norms
        norm = NORM_OF_DISTANCE[self.distance.p]
        if norm not in norms:
            got = f"settings that work for {' and '.join(norms)} only"
            raise InvalidArgumentError(type(self).__name__, got, f"settings that work for {norm}")

    def _search(
        self, module: FoolboxModule, inputs: Tensor, labels: Tensor, *, references: Tensor | None, **ways: Any
    ) -> Tensor:
        attack: NativeAttack = self.native()
        expected = "robust_ext.estimators.DefendedPyTorchModel"
        return search_defended(attack, module, inputs, labels, expected=expected, references=references, **ways)


class ImitatingFixedEpsilonAttack(AwareFixedEpsilonAttack):
    """Base of those that imitate reference points, which are a keyword of the call: ``attack(..., references=...)``."""

    def run(
        self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, references: Any = None, **kwargs: Any
    ) -> Any:
        """Perturb a batch, see :meth:`NativeFixedEpsilonAttack.run`.

        Args:
            model: With a detector.
            inputs: A batch ``(N, ...)`` in the model's bounds, a PyTorch tensor or EagerPy's.
            criterion: Labels ``(N,)``, or a criterion.
            epsilon: At least 0, in units of the inputs.
            references: Clean points of the classes that inputs are to be taken for (the class aimed at, or any but
                their own), which the detector lets pass: ``(N, R, ...)``, or ``(R, ...)`` for all inputs.
            **kwargs: There are none.

        Returns:
            Points in the ball and in the bounds, of the type of the inputs.

        Raises:
            ValueError: There are no references, or an argument is not accepted.
        """
        _base.raise_if_kwargs(kwargs)
        points = None if references is None else torch_tensor("references", ep.astensor(references))
        return self._perturb(model, inputs, criterion, epsilon=epsilon, references=points)


class BaseSelectivePGD(AwareFixedEpsilonAttack):
    """Selective PGD, see :class:`robust_ext.attacks.orthogonal.SelectivePGD`; its subclasses have a norm.

    Args:
        steps: In each run, at least 1.
        step_size: Relative to epsilon.
        restarts: Runs from starts of their own.
        loss: Of the classifier: ``"margin"`` or ``"ce"``.
        confidence: Margin in logits from which a row counts as misclassified.
        step: ``"l2"``, the gradient divided by its length, or ``"sign"``, for linf only.
        decay: Whether the step size falls to zero over a run.
        start: ``"random"`` or ``"input"``.
        samples: Calls that are averaged, for random detectors.
        seed: Of all draws, the same in every call; None: what ``torch.manual_seed`` makes of them.
    """

    core: ClassVar[type[DetectorAwareAttack]] = SelectivePGD

    def __init__(
        self,
        *,
        steps: int = 1000,
        step_size: float = 0.1,
        restarts: int = 1,
        loss: str = "margin",
        confidence: float = 0.0,
        step: str = "l2",
        decay: bool = True,
        start: str = "random",
        samples: int = 1,
        seed: int | None = None,
    ) -> None:
        self.steps = steps
        self.step_size = step_size
        self.restarts = restarts
        self.loss = loss
        self.confidence = confidence
        self.step = step
        self.decay = decay
        self.start = start
        self.samples = samples
        self.seed = seed
        self._check()


class BaseOrthogonalPGD(BaseSelectivePGD):
    """Orthogonal PGD, see :class:`robust_ext.attacks.orthogonal.OrthogonalPGD`; its subclasses have a norm.

    Arguments are those of :class:`BaseSelectivePGD`.
    """

    core = OrthogonalPGD


class BaseJointLoss(AwareFixedEpsilonAttack):
    """Joint loss, see :class:`robust_ext.attacks.joint_loss.JointLoss`; its subclasses have a norm.

    Args:
        steps: In each run, at least 1.
        restarts: Runs, and so values of alpha that can be tried.
        loss: Of the classifier, by a name of :data:`robust_ext.attacks._common.objectives.OBJECTIVES`.
        alpha: Weight of the detector in the first run, above 0.
        step_size: Relative to epsilon.
        step: ``"l2"``, the gradient divided by its length, or ``"sign"``, for linf only.
        decay: Whether the step size falls to zero over a run.
        start: ``"random"`` or ``"input"``.
        samples: Calls that are averaged, for random detectors.
        seed: Of all draws, the same in every call; None: what ``torch.manual_seed`` makes of them.
    """

    core = JointLoss

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
        seed: int | None = None,
    ) -> None:
        self.steps = steps
        self.restarts = restarts
        self.loss = loss
        self.alpha = alpha
        self.step_size = step_size
        self.step = step
        self.decay = decay
        self.start = start
        self.samples = samples
        self.seed = seed
        self._check()


class LinfSelectivePGDAttack(BaseSelectivePGD):
    """Linf selective PGD."""

    distance = _distances.linf


class L2SelectivePGDAttack(BaseSelectivePGD):
    """L2 selective PGD."""

    distance = _distances.l2


class L1SelectivePGDAttack(BaseSelectivePGD):
    """L1 selective PGD."""

    distance = _distances.l1


class LinfOrthogonalPGDAttack(BaseOrthogonalPGD):
    """Linf orthogonal PGD."""

    distance = _distances.linf


class L2OrthogonalPGDAttack(BaseOrthogonalPGD):
    """L2 orthogonal PGD."""

    distance = _distances.l2


class LinfJointLossAttack(BaseJointLoss):
    """Linf joint loss."""

    distance = _distances.linf


class L2JointLossAttack(BaseJointLoss):
    """L2 joint loss."""

    distance = _distances.l2


class L1JointLossAttack(BaseJointLoss):
    """L1 joint loss."""

    distance = _distances.l1
