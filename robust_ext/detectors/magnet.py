"""MagNet: what autoencoders trained on clean images cannot reconstruct.

Meng, Chen, "MagNet: a Two-Pronged Defense against Adversarial Examples" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, warn
from robust_ext.core.modules import buffer, module_class
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import setting
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_bounds, check_choice, check_inputs, check_integer, to_unit
from robust_ext.detectors._features.autoencoder import Autoencoder, check_structure
from robust_ext.detectors.base import Detector, check_clean
from robust_ext.detectors.calibration import Calibration
from robust_ext.detectors.observation import Observation, observe
from robust_ext.detectors.training import TrainingSet, check_training, minimise

# Divergences below this are rounding of 32-bit floats.
_ROUNDING = 1e-7
# Fitted by name, sigmoid autoencoders learn little in the few steps of 256 images at .001 that there is time for.
STEPS = {"batch_size": 32, "learning_rate": 0.01}
IMAGES = 100_000


def _check_structures(value: object) -> tuple[tuple[int | str, ...], ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidArgumentError("structures", value, "one encoder or more, as in [[3, 'average', 3], [3]]")
    return tuple(check_structure(structure) for structure in value)


@module_class
class MagNetDetector(Detector):
    """The largest of several reconstruction errors and divergences (Meng & Chen 2017, section 4).

    One part for each autoencoder A: ``mean |x - A(x)|^p``. One for each temperature T: the Jensen-Shannon divergence
    (natural logarithm) of ``softmax(f(x) / T)`` and ``softmax(f(A(x)) / T)``, with f the logits.

    The paper detects an input when any part lies above its own threshold. Each part is therefore divided by its limit,
    the value that a share of clean inputs exceeds, and the score is the maximum: above 1 exactly where some part is
    above its limit. :meth:`fit` takes limits at 5% of the training inputs, so that scores can be compared;
    :meth:`calibrate` takes them again, at the given rate, and then the threshold of the maximum, so that all parts
    together flag at most that share. ``detector.threshold = torch.tensor(1.0)`` is the paper's rule, by which each part
    alone flags that share.

    Attributes:
        autoencoders: Empty until fitted.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> inputs, _ = load_dataset("digits", split="train").take(range(200))
        >>> detector = MagNetDetector.preset("mnist", digits_network())
        >>> errors = detector.fit(inputs, epochs=2)
        >>> detector.parts(inputs[:4]).shape
        torch.Size([4, 2])
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "mnist": {"structures": ((3, "average", 3), (3,)), "powers": (2, 1), "noise": 0.1, "epochs": 100},
        "cifar10": {"structures": ((3,),), "powers": (1,), "temperatures": (10, 40), "noise": 0.025, "epochs": 350},
    }

    structures: Sequence[Sequence[int | str]] = setting(
        default=((3, "average", 3), (3,)),
        help='The encoder of each autoencoder: numbers of filters, and ``"average"`` for a pooling of 2x2.',
        check=_check_structures,
    )
    powers: Sequence[float] = setting(default=(2, 1), help="p of each autoencoder's error, above 0.", above=0)
    temperatures: Sequence[float] = setting(default=(), help="T of each divergence, above 0.", above=0)
    reformer: int = setting(default=0, help="Index of the autoencoder of the divergences.", minimum=0)
    noise: float = setting(
        default=0.1, help="Standard deviation of the training noise, in units of the bounds' width.", minimum=0
    )
    epochs: int = setting(default=100, help="Passes over the data in training.", minimum=1)
    bounds: tuple[float, float] = setting(default=(0.0, 1.0), help="Bounds of the images.", check=check_bounds)
    channels: int | None = setting(default=None, help="Channels of the images; :meth:`fit` finds out.", minimum=1)
    limits: Tensor = buffer("What each part is divided by, ``(parts,)``: errors first; empty until fitted.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.powers) != len(self.structures):
            expected = f"one for each of the {len(self.structures)} autoencoders"
            raise InvalidArgumentError("powers", self.powers, expected)
        check_integer("reformer", self.reformer, minimum=0, maximum=len(self.structures) - 1)
        with seeded_globals(0):
            self.autoencoders = nn.ModuleList() if self.channels is None else self._make(self.channels)

    @classmethod
    def preset(cls, name: str, classifier: nn.Module, **settings: Any) -> MagNetDetector:
        """The detector of the paper, but for some settings.

        ``name`` is ``"mnist"``: two autoencoders, no divergence; or ``"cifar10"``: one, with divergences at T = 10 and
        40.
        """
        check_choice("name", name, cls.presets)
        return cls(classifier, **{**cls.presets[name], **settings})

    @classmethod
    def training_settings(
        cls, classifier: nn.Module, clean: Tensor, constants: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Training in small steps until it has seen 100,000 images or its epochs are over, unless settings differ."""
        passes = -(-IMAGES // len(clean))
        return {**constants, **STEPS, "epochs": min(constants.get("epochs", passes), passes), **given}

    def fit_to(self, data: TrainingSet, settings: Mapping[str, Any], *, seed: int) -> None:
        """Fit it on all clean rows."""
        self.fit(data.clean, seed=seed, **settings)

    def fit(
        self,
        inputs: Tensor,
        *,
        epochs: int | None = None,
        batch_size: int = 256,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> list[list[float]]:
        """Train the autoencoders by Adam to reconstruct clean images ``(N, C, H, W)`` from noisy ones.

        See :class:`Detector` for the arguments; ``epochs`` go instead of the constructor's. Returns for each
        autoencoder the mean squared error of each epoch, in units of [0, 1].
        """
        count = self.epochs if epochs is None else epochs
        check_training(count, batch_size, learning_rate, seed)
        inputs = check_inputs("inputs", inputs, bounds=self.bounds)
        if inputs.dim() != 4 or not len(inputs):
            raise InvalidArgumentError("inputs", f"shape {tuple(inputs.shape)}", "at least one image, (N, C, H, W)")
        device = module_device(self.classifier)
        inputs = inputs.to(device)
        with seeded_globals(seed), torch.enable_grad():
            made = self._make(inputs.shape[1]).to(device).requires_grad_(True)
            errors = []
            for one in made:
                noisy = partial(_reconstruction, one, inputs, self.noise)
                errors.append(minimise(one, noisy, len(inputs), count, batch_size, learning_rate))
        # What the mean image would leave.
        spread = float(to_unit(inputs, self.bounds).var(0, correction=0).mean())
        for position, error in enumerate(found[-1] for found in errors):
            if len(inputs) > 1 and error >= spread:
                warn(
                    f"detector MagNetDetector: autoencoder {position} reconstructs training images no better than "
                    f"their mean would (mean squared error {error:.3g}, variance {spread:.3g}); train longer"
                )
        self.channels, self.autoencoders = inputs.shape[1], made.requires_grad_(False)
        self._take_limits(inputs, 0.05, batch_size)
        return errors

    def parts(self, x: Tensor) -> Tensor:
        """The parts of images ``(N, C, H, W)``, ``(N, parts)``: errors first, then divergences; with gradients."""
        return self.parts_of(observe(self.classifier, x))

    def parts_of(self, observed: Observation) -> Tensor:
        """The parts of a forward pass, ``(N, parts)``, with gradients; a further one is made for divergences."""
        self.check_fitted(len(self.autoencoders), on="clean_training_inputs")
        x = observed.inputs
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise self.error(f"was fitted to images of {self.channels} channels, got shape {tuple(x.shape)}")
        rebuilt = [autoencoder(x) for autoencoder in self.autoencoders]
        found = [
            (to_unit(x, self.bounds) - to_unit(other, self.bounds)).abs().pow(power).flatten(1).mean(1)
            for other, power in zip(rebuilt, self.powers, strict=True)
        ]
        if self.temperatures:
            logits = self.classifier(rebuilt[self.reformer])
            found += [jensen_shannon(observed.logits / t, logits / t) for t in self.temperatures]
        return torch.stack(found, 1)

    def score_of(self, observed: Observation) -> Tensor:
        """The largest part in units of its limit, ``(N,)``."""
        self.check_fitted(self.limits.numel(), on="clean_training_inputs")
        return (self.parts_of(observed) / self.limits).amax(1)

    def calibrate(
        self, inputs: Tensor, *, false_positive_rate: float = 0.05, per_class: bool = False, batch_size: int = 256
    ) -> Calibration:
        """Set the limits of all parts, which each part alone exceeds at that rate, and the threshold of their maximum.

        Limits are common to all classes; see :meth:`Detector.calibrate`.
        """
        self.check_fitted(self.limits.numel(), on="clean_training_inputs")
        rate = check_clean(inputs, batch_size, false_positive_rate)
        before = self.limits
        try:
            self._take_limits(inputs, rate, batch_size)
            return super().calibrate(inputs, false_positive_rate=rate, per_class=per_class, batch_size=batch_size)
        except Exception:
            # The threshold that is kept belongs to the limits that it was set with.
            self.limits = before
            raise

    def _make(self, channels: int) -> nn.ModuleList:
        made = [Autoencoder(structure, channels=channels, bounds=self.bounds) for structure in self.structures]
        return nn.ModuleList(made).eval().requires_grad_(False)

    def _take_limits(self, inputs: Tensor, rate: float, batch_size: int) -> None:
        parts = torch.cat(self.over_batches(inputs, self.parts_of, batch_size))
        if not bool(torch.isfinite(parts).all()):
            raise self.error("errors or divergences of clean inputs are not finite")
        exceeding = min(int(rate * len(parts) + 1e-9), len(parts) - 1)
        self.limits = parts.sort(0, descending=True).values[exceeding].clamp_min(_ROUNDING)


def _reconstruction(one: nn.Module, inputs: Tensor, noise: float, rows: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(one, Autoencoder)
    return one.loss(inputs[rows], noise=noise)


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence, in nats, of the softmax of two sets of logits ``(N, K)``, ``(N,)``, in [0, log 2]."""
    one, other = first.log_softmax(1), second.log_softmax(1)
    middle = torch.logaddexp(one, other) - math.log(2)
    both = one.exp() * (one - middle) + other.exp() * (other - middle)
    return both.sum(1) / 2
