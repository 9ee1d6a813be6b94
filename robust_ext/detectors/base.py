"""Detectors: a score of how adversarial an input looks, and a threshold from clean data."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from typing_extensions import Self

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.files import replace_file
from robust_ext.core.foreign import foreign_code
from robust_ext.core.modules import SettingsModule, module_class, positional
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_integer, check_number
from robust_ext.detectors.calibration import Calibration, find_threshold
from robust_ext.detectors.observation import Observation, observe

if TYPE_CHECKING:
    from robust_ext.detectors.training import TrainingSet

T = TypeVar("T")


@module_class
class Detector(SettingsModule, ABC):
    """A detector next to a classifier. A subclass computes a score from one forward pass of the classifier.

    It declares its settings, see :mod:`robust_ext.core.modules`. What
    :data:`robust_ext.detectors.catalogue.DETECTORS` holds is fitted by its name, with ``presets``,
    :meth:`training_settings` and :meth:`fit_to`.

    Where there is something to fit, ``fit`` takes clean training inputs ``(N, ...)``, floating point and in the bounds;
    a supervised detector also adversarial ones ``(M, ...)``, made by the attacks to detect. Its ``batch_size`` is the
    number of inputs in one pass or step, and its ``seed`` that of everything that is drawn; global generators are left
    alone. It raises InvalidArgumentError for other tensors and settings, ModelError where features are not finite, and
    MissingDependencyError where scikit-learn is needed.

    Attributes:
        layers: Names of the classifier's layers whose outputs the score needs.
        differentiable: Whether gradients flow from the score to the input.
        random: Whether two calls may give different scores; randomness is drawn from torch's global generator.
        threshold: Scores above it are detected: ``()``, or one a predicted class ``(K,)``; NaN until calibrated.
        supervised: Whether it is fitted on adversarial inputs as well.
        presets: The constants of its paper by data set, which are settings.
    """

    classifier: nn.Module = positional(
        "The network it watches, from inputs to logits; in eval mode. Shared, not copied.", kw_only=False
    )
    layers: Sequence[str] = field(default=(), init=False)
    threshold: Tensor = field(init=False)
    differentiable = True
    random = False
    supervised: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mnist": {}, "cifar10": {}}

    def __post_init__(self) -> None:
        """Validate the settings, and register the buffers."""
        super().__post_init__()
        self.register_buffer("threshold", torch.tensor(torch.nan, device=module_device(self.classifier)))
        self.training = False

    @abstractmethod
    def score_of(self, observed: Observation) -> Tensor:
        """The score of each input, ``(N,)``, from a forward pass that has :attr:`layers`: higher for more adversarial.

        ModelError: the detector is not fitted, or to another classifier or other inputs.
        """

    def score(self, x: Tensor) -> Tensor:
        """The score of inputs ``(N, ...)``, ``(N,)``."""
        return self.checked(observe(self.classifier, x, self.layers))

    def forward(self, x: Tensor) -> Tensor:
        """:meth:`score`."""
        return self.score(x)

    def checked(self, observed: Observation) -> Tensor:
        """The score of a forward pass, as one number an input; ModelError where it is something else."""
        rows, hint = len(observed.inputs), "correct it, or leave the detector out"
        with foreign_code("detector", f"{type(self).__name__}, on {rows} inputs,", hint=hint, kind=ModelError):
            scores = self.score_of(observed)
        if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.shape != (rows,):
            shown = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            expected = f"expected one floating point score an input, of shape ({rows},)"
            raise self.error(f"returned {shown} for {rows} inputs, {expected}")
        return scores

    def score_margin_of(self, observed: Observation) -> Tensor:
        """Return the margins of the scores of a forward pass above the threshold, ``(N,)``; ModelError without one."""
        if bool(self.threshold.isnan().all()):
            raise self.error("has no threshold; call calibrate(clean_inputs, false_positive_rate=0.05) first")
        limit = self.threshold if self.threshold.dim() == 0 else self.threshold[observed.predicted]
        return self.checked(observed) - limit

    def score_margin(self, x: Tensor) -> Tensor:
        """Return the margins of the scores of inputs ``(N, ...)`` above the threshold, ``(N,)``."""
        return self.score_margin_of(observe(self.classifier, x, self.layers))

    def decide(self, x: Tensor) -> Tensor:
        """Return a mask of detected inputs ``(N, ...)``, bool ``(N,)``; scores of NaN count as detected."""
        with torch.no_grad():
            return rejected(self.score_margin(x))

    def calibrate(
        self, inputs: Tensor, *, false_positive_rate: float = 0.05, per_class: bool = False, batch_size: int = 256
    ) -> Calibration:
        """Set the threshold: the lowest of the scores above which at most a share of clean inputs lies.

        Args:
            inputs: Clean inputs ``(N, ...)`` that the detector was not fitted on.
            false_positive_rate: The share, in (0, 1).
            per_class: One threshold for each predicted class.
            batch_size: Inputs scored at once.

        Raises:
            InvalidArgumentError: There are too few inputs to tell that share from none.
            ModelError: Scores are NaN, or all the same.
        """
        rate = check_clean(inputs, batch_size, false_positive_rate)
        passes = self.over_batches(inputs, lambda one: (self.checked(one), one.predicted, one.logits), batch_size)
        scores, predicted = (torch.cat([each[part] for each in passes]) for part in (0, 1))
        classes = passes[0][2].shape[1] if per_class else None
        try:
            self.threshold, found = find_threshold(scores, predicted, classes=classes, rate=rate)
        except ModelError as error:
            raise self.error(str(error)) from error
        return found

    def over_batches(self, inputs: Tensor, function: Callable[[Observation], T], batch_size: int = 256) -> list[T]:
        """Apply a function to the forward pass of each batch of inputs ``(N, ...)``, without gradients."""
        device = module_device(self)
        with torch.no_grad():
            parts = torch.split(inputs, batch_size)
            return [function(observe(self.classifier, part.to(device), self.layers)) for part in parts]

    def error(self, problem: str) -> ModelError:
        """An error that names the detector."""
        return ModelError(f"detector {type(self).__name__}: {problem}")

    def remake(self) -> str:
        """Return the advice for a detector that no file can hold."""
        return f"make it again and set its threshold, detector.threshold = torch.tensor({self.threshold.tolist()})"

    def check_fitted(self, fitted: object, *, on: str = "clean_inputs, adversarial_inputs") -> None:
        """Raise ModelError where ``fitted`` is not true, with what ``fit`` takes."""
        if not fitted:
            raise self.error(f"is not fitted; call fit({on}) first")

    def check_same(self, fitted: object, met: object, what: str) -> None:
        """Raise ModelError where sizes differ from those that the detector was fitted to."""
        if fitted != met:
            raise self.error(f"was fitted to {fitted} {what}, got {met}; fit it to this classifier")

    @classmethod
    def training_settings(
        cls, classifier: nn.Module, clean: Tensor, constants: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Settings of the constructor and of ``fit`` for a fit by name, on clean training inputs ``(N, ...)``.

        ``constants`` are those of :attr:`presets` for such inputs; what the caller has ``given`` takes precedence.
        """
        return {**constants, **given}

    def fit_to(self, data: TrainingSet, settings: Mapping[str, Any], *, seed: int) -> None:
        """Fit it on training data, with keyword arguments of ``fit`` and all draws by the seed; nothing by default."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write fitted and calibrated values to a safetensors file, without the classifier.

        ModelError: it contains code, which no file can hold.
        """
        about, values = self.packed()
        about["checksum"] = _checksum(about, values)
        replace_file(Path(path), safetensors.torch.save(values, metadata=about))

    @classmethod
    def load(cls, path: str | os.PathLike[str], classifier: nn.Module, *, kinds: Sequence[type[Detector]] = ()) -> Self:
        """Read what :meth:`save` wrote, for the classifier that was watched; DataError for any other file.

        ``kinds`` are classes of members of a combined detector that are not in :mod:`robust_ext.detectors`.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise DataError(f"{path}: no file written by Detector.save ({error})") from error
        stated, again = about.pop("checksum", None), "fit and save the detector again"
        try:
            if stated not in (None, _checksum(about, values)):
                raise DataError(f"does not match its checksum, so it is damaged; {again}")
            found = cls.unpacked(about, values, classifier, kinds=kinds)
            if stated is None:
                raise DataError(f"has no checksum, as those of earlier versions; {again}")
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        return found

    def packed(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return the content of a file: metadata, and tensors by name."""
        own = {name: value.detach().contiguous() for name, value in self.state_dict().items() if _own(name)}
        return {"detector": type(self).__name__, "settings": json.dumps(self.settings)}, own

    @classmethod
    def check_kind(cls, about: Mapping[str, str]) -> None:
        """Raise DataError where the metadata of a file is not that of this class."""
        made = about.get("detector")
        if made != cls.__name__:
            raise DataError(f"holds {made or 'no detector'}, expected {cls.__name__}")

    @classmethod
    def unpacked(
        cls,
        about: Mapping[str, str],
        values: Mapping[str, Tensor],
        classifier: nn.Module,
        *,
        kinds: Sequence[type[Detector]] = (),
    ) -> Self:
        """The detector of what :meth:`packed` returned; DataError where it is another one."""
        cls.check_kind(about)
        detector = cls(classifier, **json.loads(about.get("settings", "{}")))
        wanted = {name for name in detector.state_dict() if _own(name)}
        if wanted != set(values):
            raise DataError(f"holds {sorted(values)}, expected {sorted(wanted)}")
        device = module_device(classifier)
        for name, value in values.items():
            owner, _, last = name.rpartition(".")
            part = detector.get_submodule(owner)
            # Shapes may be others than those of a detector that was not fitted.
            moved = value.to(device)
            setattr(part, last, nn.Parameter(moved, requires_grad=False) if last in part._parameters else moved)
        return detector


def rejected(margin: Tensor, *, inverted: bool = False) -> Tensor:
    """Return a mask of rejected inputs by score margins, bool ``(N,)``: above 0, inverted otherwise, or NaN."""
    return ((margin > 0) ^ inverted) | margin.isnan()


def check_clean(inputs: object, batch_size: object, rate: object = 0.5) -> float:
    """Refuse what is no tensor of at least one clean input, no batch size or no rate, which is returned."""
    name = "false_positive_rate"
    share = check_number(name, rate, minimum=0, maximum=1, open_minimum=True, open_maximum=True)
    check_integer("batch_size", batch_size, minimum=1)
    if not isinstance(inputs, Tensor) or not inputs.dim() or not len(inputs):
        raise InvalidArgumentError("inputs", "no clean inputs", "a tensor of at least one clean input")
    return share


def _checksum(about: Mapping[str, str], values: dict[str, Tensor]) -> str:
    content = json.dumps(dict(about), sort_keys=True).encode() + safetensors.torch.save(values)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _own(name: str) -> bool:
    return not name.startswith("classifier.")
