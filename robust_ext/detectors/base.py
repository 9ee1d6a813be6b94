"""Detectors: a score of how adversarial an input looks, and a threshold from clean data."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.files import replace_file
from robust_ext.core.statistics import proportion_interval
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_integer, check_number
from robust_ext.detectors.observation import Observation, observe

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How a threshold came about.

    Args:
        false_positive_rate: What was asked for.
        achieved: Share of the calibration data that is detected; at most what was asked for.
        interval: Exact 95% interval of the true rate.
        samples: Size of the calibration data.
        per_class: Whether each predicted class has a threshold of its own.
    """

    false_positive_rate: float
    achieved: float
    interval: tuple[float, float]
    samples: int
    per_class: bool

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


class Detector(nn.Module, ABC):
    """A detector beside a classifier. A subclass computes a score from one forward pass of the classifier.

    Args:
        classifier: The network it watches, from inputs to logits; in eval mode. It is shared, not copied.

    Attributes:
        layers: Names of the classifier's layers whose outputs the score needs.
        differentiable: Whether gradients flow from the score to the input.
        random: Whether two calls may give different scores; randomness is drawn from torch's global generator.
        threshold: Scores above it are detected: ``()``, or one a predicted class ``(K,)``; NaN until calibrated.
    """

    layers: tuple[str, ...] = ()
    differentiable: bool = True
    random: bool = False
    threshold: Tensor

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier
        self.register_buffer("threshold", torch.tensor(torch.nan, device=module_device(classifier)))
        self.training = False

    @abstractmethod
    def score_of(self, seen: Observation) -> Tensor:
        """The score of each input, ``(N,)``: higher means more adversarial.

        Args:
            seen: One forward pass of the classifier, with the outputs of :attr:`layers`.
        """

    def score(self, x: Tensor) -> Tensor:
        """The score of inputs ``(N, ...)``, ``(N,)``."""
        return self.checked(observe(self.classifier, x, self.layers))

    def forward(self, x: Tensor) -> Tensor:
        """The score of inputs ``(N, ...)``, ``(N,)``."""
        return self.score(x)

    def checked(self, seen: Observation) -> Tensor:
        """The score of a forward pass, as one number an input.

        Raises:
            ModelError: It is something else.
        """
        scores = self.score_of(seen)
        rows = len(seen.inputs)
        if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.shape != (rows,):
            shown = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise ModelError(
                f"detector {type(self).__name__}: returned {shown} for {rows} inputs, expected one floating point "
                f"score an input, of shape ({rows},)"
            )
        return scores

    def score_margin_of(self, seen: Observation) -> Tensor:
        """How far the score of a forward pass lies above the threshold, ``(N,)``: detected where above 0.

        Raises:
            ModelError: The detector has no threshold yet.
        """
        if bool(self.threshold.isnan().all()):
            raise ModelError(
                f"detector {type(self).__name__}: has no threshold; call calibrate(clean_inputs, "
                "false_positive_rate=0.05) first"
            )
        limit = self.threshold if self.threshold.dim() == 0 else self.threshold[seen.predicted]
        return self.checked(seen) - limit

    def score_margin(self, x: Tensor) -> Tensor:
        """How far the score of inputs ``(N, ...)`` lies above the threshold, ``(N,)``."""
        return self.score_margin_of(observe(self.classifier, x, self.layers))

    def decide(self, x: Tensor) -> Tensor:
        """Which inputs ``(N, ...)`` are detected, bool ``(N,)``.

        Raises:
            ModelError: The detector has no threshold yet, or scores NaN.
        """
        with torch.no_grad():
            return self.detected(self.score_margin(x))

    def detected(self, margin: Tensor) -> Tensor:
        """Which inputs of this margin ``(N,)`` are detected, bool ``(N,)``.

        Raises:
            ModelError: It is NaN.
        """
        if bool(margin.isnan().any()):
            raise ModelError(f"detector {type(self).__name__}: scored NaN, which is neither detected nor let pass")
        return margin > 0

    def calibrate(
        self,
        inputs: Tensor,
        *,
        false_positive_rate: float = 0.05,
        per_class: bool = False,
        batch_size: int = 256,
    ) -> Calibration:
        """Set the threshold so that at most a share of clean inputs is detected.

        It is the lowest of the scores above which at most that share lies.

        Args:
            inputs: Clean inputs ``(N, ...)`` that the detector was not fitted on.
            false_positive_rate: The share, in (0, 1).
            per_class: One threshold for each predicted class.
            batch_size: Inputs scored at once.

        Raises:
            InvalidArgumentError: There are too few inputs to tell that share from none.
            ModelError: Scores are NaN, or all the same.
        """
        check_number(
            "false_positive_rate", false_positive_rate, minimum=0, maximum=1, open_minimum=True, open_maximum=True
        )
        check_integer("batch_size", batch_size, minimum=1)
        if not isinstance(inputs, Tensor) or not len(inputs):
            raise InvalidArgumentError("inputs", "no clean inputs", "a tensor of at least one clean input")
        scores, predicted, classes = self._score_all(inputs, batch_size)
        name = type(self).__name__
        if bool(scores.isnan().any()):
            raise ModelError(
                f"detector {name}: scored NaN on {int(scores.isnan().sum())} of {len(scores)} clean inputs"
            )
        if len(scores) > 1 and bool((scores == scores[0]).all()):
            raise ModelError(
                f"detector {name}: scored all {len(scores)} clean inputs {float(scores[0]):.6g}, so that it detects "
                "either everything or nothing; look at its score"
            )
        if per_class:
            parts = [scores[predicted == label] for label in range(classes)]
            limits = [_limit(part, false_positive_rate, f" of class {label}") for label, part in enumerate(parts)]
            self.threshold = torch.stack(limits)
        else:
            self.threshold = _limit(scores, false_positive_rate, "")
        flagged = int((scores > (self.threshold[predicted] if per_class else self.threshold)).sum())
        return Calibration(
            false_positive_rate=false_positive_rate,
            achieved=flagged / len(scores),
            interval=proportion_interval(flagged, len(scores)) or (0.0, 1.0),
            samples=len(scores),
            per_class=per_class,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments, beside the classifier, with which the constructor makes this detector; JSON values."""
        return {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was fitted and calibrated to a safetensors file, without the classifier.

        Args:
            path: The file.
        """
        own = {name: value.detach().contiguous() for name, value in self.state_dict().items() if _own(name)}
        about = {"detector": type(self).__name__, "settings": json.dumps(self.settings)}
        replace_file(Path(path), safetensors.torch.save(own, metadata=about))

    @classmethod
    def load(cls, path: str | os.PathLike[str], classifier: nn.Module) -> Self:
        """Read what :meth:`save` wrote.

        Args:
            path: The file.
            classifier: The network that it watched.

        Raises:
            DataError: The file cannot be read, or holds another detector.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            made = about.get("detector")
            settings = json.loads(about.get("settings", "{}"))
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise DataError(f"{path}: no file written by Detector.save ({error})") from error
        if made != cls.__name__:
            raise DataError(f"{path}: holds {made or 'no detector'}, expected {cls.__name__}")
        detector = cls(classifier, **settings)
        wanted = {name for name in detector.state_dict() if _own(name)}
        if wanted != set(values):
            raise DataError(f"{path}: holds {sorted(values)}, expected {sorted(wanted)}")
        device = module_device(classifier)
        for name, value in values.items():
            owner, _, last = name.rpartition(".")
            part = detector.get_submodule(owner)
            # Shapes may be others than those of a detector that was not fitted.
            if last in part._parameters:
                setattr(part, last, nn.Parameter(value.to(device), requires_grad=False))
            else:
                setattr(part, last, value.to(device))
        return detector

    def _score_all(self, inputs: Tensor, batch_size: int) -> tuple[Tensor, Tensor, int]:
        """Scores and predicted classes of many inputs, and the number of classes."""
        scores, predicted, classes = [], [], 0
        with torch.no_grad():
            for batch in torch.split(inputs, batch_size):
                seen = observe(self.classifier, batch.to(self.threshold.device), self.layers)
                scores.append(self.checked(seen))
                predicted.append(seen.predicted)
                classes = seen.logits.shape[1]
        return torch.cat(scores), torch.cat(predicted), classes


def _own(name: str) -> bool:
    return not name.startswith("classifier.")


def _limit(scores: Tensor, rate: float, which: str) -> Tensor:
    """The lowest of the scores above which at most a share of them lies."""
    detected = int(rate * len(scores) + 1e-9)
    if detected < 1:
        raise InvalidArgumentError(
            "false_positive_rate",
            f"{rate:g} with {len(scores)} clean inputs{which}",
            f"at least {-int(-1 // rate)} clean inputs{which}, of which one may be detected",
        )
    return scores.sort(descending=True).values[min(detected, len(scores) - 1)].clone()
