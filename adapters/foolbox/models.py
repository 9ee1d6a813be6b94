"""Binarized classifiers and classifiers with a detector as Foolbox models, and the criterion for the latter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import eagerpy
import torch
from torch import Tensor, nn

from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel, norm_name
from robust_ext.core.validation import check_bounds
from robust_ext.detectors.scored import ScoreDetector
from robust_ext.models.defended import Defended
from robust_ext.models.wrapping import PaddedClasses, Rescaled
from robust_ext.registry.detector import as_detector
from robust_ext.registry.model import as_module

if TYPE_CHECKING:
    from robust_ext.engine.verify import Verification
    from robust_ext.evaluations.binarization import Planted

M = TypeVar("M")
PyTorchModel: Any = foolbox.PyTorchModel
Misclassification: Any = foolbox.criteria.Misclassification


class BinarizedPyTorchModel(PyTorchModel):  # type: ignore[misc]
    """A Foolbox ``PyTorchModel`` with adversarial examples planted in it, for any Foolbox attack.

    Start attacks at :attr:`inputs` with :attr:`labels`, and hand what they return to :meth:`score`. Foolbox's own
    attacks query all rows in order, as far from the inputs as they like. One that queries some rows far from their
    inputs is refused with a ModelError, and is to be run on one problem at a time, see :meth:`single`;
    ``robust_ext.binarization_test`` does all that by itself, and gives a verdict.

    Args:
        planted: The problems.
        classes: Classes of the model: more than two are padding that never wins, for attacks that compare three.

    Source: Zimmermann et al., "Increasing Confidence in Adversarial Robustness Evaluations" (2022), algorithm 1.
    """

    def __init__(self, planted: Planted, *, classes: int = 2) -> None:
        module: nn.Module = planted.module
        self.planted_problems = planted
        self.classes = classes
        super().__init__(
            module if classes == 2 else PaddedClasses(module, classes=classes).eval(),
            bounds=planted.settings.threat_model.bounds,
            device=planted.inputs.device,
        )

    @classmethod
    def from_model(
        cls,
        model: Any,
        inputs: Any,
        *,
        epsilon: float,
        norm: float | str = "linf",
        classes: int = 2,
        layer: str | None = None,
        **settings: Any,
    ) -> BinarizedPyTorchModel:
        """Plant an adversarial example for each input of a Foolbox model.

        Args:
            model: A Foolbox ``PyTorchModel``, wrapped or not; its preprocessing and bounds are kept.
            inputs: Clean inputs, a tensor ``(N, ...)`` (or EagerPy's) in the model's bounds.
            epsilon: Budget in the units of the inputs.
            norm: ``"linf"``, ``"l2"`` or ``"l1"``, or ``np.inf``, 2 or 1.
            classes: See the class.
            layer: Name of the linear layer that makes the logits; found when left out.
            **settings: Of the test, see :class:`robust_ext.evaluations.binarization.BinarizationSettings`.

        Raises:
            InvalidArgumentError: An argument is outside its range.
            ModelError: The model cannot be split, or nothing could be planted in it.
        """
        # The public face: adapters lie below the evaluations, and planting is one of them.
        from robust_ext import plant

        threat_model = ThreatModel(norm=norm_name(norm), epsilon=epsilon, bounds=_checked_bounds(model))
        raw = getattr(inputs, "raw", inputs)
        return cls(plant(model, raw, threat_model, layer=layer, **settings), classes=classes)

    @property
    def inputs(self) -> Tensor:
        """The inputs with planted points, float32 ``(M, ...)``."""
        return self.planted_problems.inputs.clone()

    @property
    def labels(self) -> Tensor:
        """Their labels, all class 0, int64 ``(M,)``."""
        return self.planted_problems.labels

    @property
    def samples(self) -> tuple[int, ...]:
        """The indices of these inputs among the given ones."""
        return self.planted_problems.samples

    def transform_bounds(
        self, bounds: tuple[float, float], inplace: bool = False, wrapper: bool = False
    ) -> BinarizedPyTorchModel:
        """Return the same problems in other bounds, with ``inputs``, planted points and threat model moved there.

        The arguments are those of Foolbox; a wrapper would know nothing of the problems, so with ``wrapper`` the result
        is the same.

        Raises:
            ModelError: In these bounds something that is planted is lost to rounding.
        """
        made = type(self)(self.planted_problems.transform_bounds(bounds), classes=self.classes)
        return _returned(self, made, inplace=inplace, wrapper=wrapper)

    def single(self, row: int) -> BinarizedPyTorchModel:
        """Return problem ``row`` alone: a model that may be queried at any points."""
        return type(self)(self.planted_problems.single(row), classes=self.classes)

    def verify(self, candidates: Tensor) -> Verification:
        """Check what an attack returned, ``(M, ...)``: finite, in bounds, within epsilon, and of another class."""
        return self.planted_problems.verify(candidates)

    def score(self, candidates: Tensor) -> float:
        """Return the test score: the share of problems that verified candidates ``(M, ...)`` solve."""
        return self.planted_problems.score(candidates)


class DefendedPyTorchModel(PyTorchModel):  # type: ignore[misc]
    """A Foolbox ``PyTorchModel`` whose inputs a detector may reject.

    With ``exposure="reject"`` its logits have one column more, the last, which wins exactly where an input is rejected.
    Attack it with :class:`Undetected` as criterion: the mere labels would count being rejected as a success.

    Args:
        defended: The module.
        bounds: Lowest and highest input value.
    """

    def __init__(self, defended: Defended, *, bounds: tuple[float, float]) -> None:
        if not isinstance(defended, Defended):
            raise InvalidArgumentError("defended", type(defended).__name__, "a robust_ext.models.defended.Defended")
        self.defended = defended
        super().__init__(defended, bounds=bounds, device=defended.detector.threshold.device)

    @classmethod
    def from_model(cls, model: Any, detector: object, *, inputs: Any, exposure: str = "reject") -> DefendedPyTorchModel:
        """Put a detector next to a Foolbox model.

        Args:
            model: A Foolbox ``PyTorchModel``, wrapped or not; its preprocessing and bounds are kept.
            detector: With a threshold, see :func:`robust_ext.as_detector`.
            inputs: A few inputs ``(n, ...)``, to see that the detector watches this model.
            exposure: ``"reject"`` or ``"classifier"``.

        Raises:
            InvalidArgumentError: An argument is of another kind.
        """
        bounds = _checked_bounds(model)
        adapted = as_module(model)
        some = torch.as_tensor(getattr(inputs, "raw", inputs))[:4]
        defended = Defended(adapted.module, as_detector(detector, adapted.module, inputs=some), exposure=exposure)
        return cls(defended, bounds=bounds)

    def transform_bounds(
        self, bounds: tuple[float, float], inplace: bool = False, wrapper: bool = False
    ) -> DefendedPyTorchModel:
        """Return the same classifier and detector for inputs in other bounds; the arguments are those of Foolbox.

        A wrapper would hide the detector, so the result is the same with and without.
        """
        given, inner = self.defended, _checked_bounds(self)
        outer = check_bounds(bounds)
        network = Rescaled(given.detector.classifier, inner, outer)
        shared = given.classifier is given.detector.classifier
        detector = ScoreDetector(
            network,
            Rescaled(given.detector, inner, outer),
            name=type(given.detector).__name__,
            differentiable=given.detector.differentiable,
            random=given.detector.random,
        )
        detector.threshold = given.detector.threshold
        classifier = network if shared else Rescaled(given.classifier, inner, outer)
        settings = {name: getattr(given, name) for name in ("inverted", "exposure", "weight")}
        made = type(self)(Defended(classifier, detector, **settings), bounds=outer)
        return _returned(self, made, inplace=inplace, wrapper=wrapper)


class Undetected(Misclassification):  # type: ignore[misc]
    """Misclassified and not rejected: what fools a classifier with a detector.

    For models whose last logit is that of being rejected (``DefendedPyTorchModel`` with ``exposure="reject"``). Attacks
    use it at the end, and many that minimise a norm while they search.

    Args:
        labels: True classes ``(N,)``.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.labels!r})"

    def __call__(self, perturbed: Any, outputs: Any) -> Any:
        """Return a mask of inputs that fool the model, bool ``(N,)``, of the type of ``outputs`` ``(N, K + 1)``."""
        outputs_, restore_type = eagerpy.astensor_(outputs)
        classes = outputs_.argmax(axis=-1)
        fooled = eagerpy.logical_and(classes != self.labels, classes != outputs_.shape[-1] - 1)
        return restore_type(fooled)


def _returned(model: M, made: M, *, inplace: bool, wrapper: bool) -> M:
    """Return a model with transformed bounds, or the given one changed in place."""
    if inplace and wrapper:
        raise InvalidArgumentError("wrapper", True, "False together with inplace=True, as in all of Foolbox")
    if inplace:
        vars(model).update(vars(made))
    return model if inplace else made


def _checked_bounds(model: Any) -> tuple[float, float]:
    """Return the bounds of a Foolbox model; raise for anything else."""
    if not isinstance(model, foolbox.models.Model):
        raise InvalidArgumentError("model", type(model).__name__, "a Foolbox PyTorchModel")
    return float(model.bounds.lower), float(model.bounds.upper)
