"""The binarized classifier as a Foolbox model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from robust_ext.adapters.libraries import load_foolbox
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.verify import Verification
from robust_ext.evaluations.binarization.planting import Planted, plant
from robust_ext.models.padded import PaddedClasses

foolbox = load_foolbox()
PyTorchModel: Any = foolbox.PyTorchModel


class BinarizedPyTorchModel(PyTorchModel):  # type: ignore[misc]
    """A Foolbox ``PyTorchModel`` with adversarial examples planted in it, for any Foolbox attack.

    Start attacks at :attr:`inputs` with :attr:`labels`, and hand what they return to :meth:`score`. Attacks that query
    points far from their inputs in other batches than the full one are to be run on one problem at a time, see
    :meth:`single`; ``robust_ext.binarization_test`` does all that by itself, and gives a verdict.

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
        norm: str = "linf",
        classes: int = 2,
        layer: str | None = None,
        **settings: Any,
    ) -> BinarizedPyTorchModel:
        """Plant an adversarial example for each input of a Foolbox model.

        Args:
            model: A Foolbox ``PyTorchModel``, wrapped or not; its preprocessing and bounds are kept.
            inputs: Clean inputs, a tensor ``(N, ...)`` (or EagerPy's) in the model's bounds.
            epsilon: Budget in the units of the inputs.
            norm: ``"linf"``, ``"l2"`` or ``"l1"``.
            classes: See the class.
            layer: Name of the linear layer that makes the logits; found when left out.
            **settings: Of the test, see :class:`robust_ext.evaluations.binarization.BinarizationSettings`.

        Raises:
            InvalidArgumentError: An argument is outside what is accepted.
            ModelError: The model cannot be split, or nothing could be planted in it.
        """
        if not isinstance(model, foolbox.models.Model):
            raise InvalidArgumentError("model", type(model).__name__, "a Foolbox PyTorchModel")
        low, high = (float(end) for end in model.bounds)
        threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=(low, high))
        raw = getattr(inputs, "raw", inputs)
        return cls(plant(model, raw, threat_model, layer=layer, **settings), classes=classes)

    @property
    def inputs(self) -> Tensor:
        """Where attacks begin, float32 ``(M, ...)``: those of the given inputs that could be planted."""
        return self.planted_problems.inputs.clone()

    @property
    def labels(self) -> Tensor:
        """Their labels, all class 0, int64 ``(M,)``."""
        return self.planted_problems.labels

    @property
    def samples(self) -> tuple[int, ...]:
        """Which of the given inputs they are."""
        return self.planted_problems.samples

    def single(self, row: int) -> BinarizedPyTorchModel:
        """Problem ``row`` alone: a model that may be asked about any points."""
        return type(self)(self.planted_problems.single(row), classes=self.classes)

    def verify(self, candidates: Tensor) -> Verification:
        """Check what an attack returned, ``(M, ...)``: finite, in bounds, within epsilon, and of another class."""
        return self.planted_problems.verify(candidates)

    def score(self, candidates: Tensor) -> float:
        """The test score: share of the problems that verified candidates ``(M, ...)`` solve."""
        return self.planted_problems.score(candidates)
