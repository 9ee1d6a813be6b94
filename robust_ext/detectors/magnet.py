"""MagNet: what autoencoders trained on clean images cannot reconstruct.

Meng, Chen, "MagNet: a Two-Pronged Defense against Adversarial Examples" (2017).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds, to_unit
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_choice, check_inputs, check_integer, check_number
from robust_ext.detectors._features.autoencoder import Autoencoder, check_structure, train_autoencoder
from robust_ext.detectors._features.divergence import jensen_shannon
from robust_ext.detectors.base import Calibration, Detector
from robust_ext.detectors.observation import Observation, observe

logger = logging.getLogger(__name__)

PRESETS: dict[str, dict[str, Any]] = {
    "mnist": {"structures": ((3, "average", 3), (3,)), "powers": (2, 1), "noise": 0.1, "epochs": 100},
    "cifar10": {"structures": ((3,),), "powers": (1,), "temperatures": (10, 40), "noise": 0.025, "epochs": 350},
}
# Divergences below this are rounding of 32-bit floats.
_ROUNDING = 1e-7


class MagNetDetector(Detector):
    """The largest of several reconstruction errors and divergences (Meng & Chen 2017, section 4).

    One part for each autoencoder A: ``mean |x - A(x)|^p``. One for each temperature T: the Jensen-Shannon divergence
    (natural logarithm) of ``softmax(f(x) / T)`` and ``softmax(f(A(x)) / T)``, with f the logits.

    The paper detects an input when any part lies above its own threshold. Each part is therefore divided by its limit,
    the value that a share of clean inputs exceeds, and the score is the maximum: above 1 exactly where some part is
    above its limit. :meth:`fit` takes limits at 5% of the training inputs, so that scores can be compared;
    :meth:`calibrate` takes them anew, at the rate it is given, and then the threshold of the maximum, so that all parts
    together flag at most that share. ``detector.threshold = torch.tensor(1.0)`` is the paper's rule, by which each part
    alone flags that share.

    Args:
        classifier: The network it watches.
        structures: The encoder of each autoencoder, see ``Autoencoder``.
        powers: p of each autoencoder's error, above 0.
        temperatures: T of each divergence, above 0.
        reformer: Index of the autoencoder of the divergences.
        noise: Standard deviation of the training noise, in units of the width of the bounds.
        epochs: Passes over the data in training.
        bounds: Of the images.
        channels: Of the images; :meth:`fit` finds out.

    Attributes:
        autoencoders: Empty until fitted.
        limits: What each part is divided by, ``(parts,)``: errors first, then divergences; empty until fitted.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> inputs, _ = load_dataset("digits", split="train").take(range(200))
        >>> detector = MagNetDetector.preset("mnist", digits_network())
        >>> errors = detector.fit(inputs, epochs=2)
        >>> detector.parts(inputs[:4]).shape
        torch.Size([4, 2])
    """

    limits: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        *,
        structures: Sequence[Sequence[int | str]] = ((3, "average", 3), (3,)),
        powers: Sequence[float] = (2, 1),
        temperatures: Sequence[float] = (),
        reformer: int = 0,
        noise: float = 0.1,
        epochs: int = 100,
        bounds: Sequence[float] = (0.0, 1.0),
        channels: int | None = None,
    ) -> None:
        super().__init__(classifier)
        if not isinstance(structures, (list, tuple)) or not structures:
            raise InvalidArgumentError("structures", structures, "one encoder or more, as in [[3, 'average', 3], [3]]")
        self.structures = tuple(check_structure(structure) for structure in structures)
        self.powers = tuple(check_number("powers", power, minimum=0, open_minimum=True) for power in powers)
        if len(self.powers) != len(self.structures):
            raise InvalidArgumentError("powers", powers, f"one for each of the {len(self.structures)} autoencoders")
        self.temperatures = tuple(check_number("temperatures", t, minimum=0, open_minimum=True) for t in temperatures)
        self.reformer = check_integer("reformer", reformer, minimum=0, maximum=len(self.structures) - 1)
        self.noise = check_number("noise", noise, minimum=0)
        self.epochs = check_integer("epochs", epochs, minimum=1)
        self.bounds = check_bounds(bounds)
        self.channels = None if channels is None else check_integer("channels", channels, minimum=1)
        with seeded_globals(0):
            self.autoencoders = nn.ModuleList() if self.channels is None else self._make(self.channels)
        self.register_buffer("limits", torch.empty(0))

    @classmethod
    def preset(cls, name: str, classifier: nn.Module, **settings: Any) -> MagNetDetector:
        """The detector of the paper.

        Args:
            name: ``"mnist"``: two autoencoders, no divergence; ``"cifar10"``: one, with divergences at T = 10 and 40.
            classifier: The network it watches.
            **settings: Those that are to differ.

        Raises:
            InvalidArgumentError: There is no such preset.
        """
        check_choice("name", name, PRESETS)
        return cls(classifier, **{**PRESETS[name], **settings})

    @property
    def settings(self) -> dict[str, Any]:
        """What makes a detector of the same sizes."""
        return {
            "structures": [list(structure) for structure in self.structures],
            "powers": list(self.powers),
            "temperatures": list(self.temperatures),
            "reformer": self.reformer,
            "noise": self.noise,
            "epochs": self.epochs,
            "bounds": list(self.bounds),
            "channels": self.channels,
        }

    def fit(
        self,
        inputs: Tensor,
        *,
        epochs: int | None = None,
        batch_size: int = 256,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> list[list[float]]:
        """Train the autoencoders on clean images, see ``train_autoencoder``.

        Args:
            inputs: Clean training images ``(N, C, H, W)`` in the bounds.
            epochs: Instead of the constructor's.
            batch_size: Images in a step.
            learning_rate: Of Adam.
            seed: Of initial weights, noise and order; global generators are left alone.

        Returns:
            For each autoencoder, the mean squared error of each epoch, in units of [0, 1].

        Raises:
            InvalidArgumentError: These are no such images or settings.
            ModelError: Parts are not finite.
        """
        count = self.epochs if epochs is None else check_integer("epochs", epochs, minimum=1)
        check_integer("batch_size", batch_size, minimum=1)
        check_number("learning_rate", learning_rate, minimum=0, open_minimum=True)
        check_integer("seed", seed, minimum=0)
        inputs = check_inputs("inputs", inputs, bounds=self.bounds)
        if inputs.dim() != 4 or not len(inputs):
            raise InvalidArgumentError("inputs", f"shape {tuple(inputs.shape)}", "at least one image, (N, C, H, W)")
        device = module_device(self.classifier)
        inputs = inputs.to(device)
        with seeded_globals(seed), torch.enable_grad():
            made = self._make(inputs.shape[1]).to(device).requires_grad_(True)
            errors = [
                train_autoencoder(
                    autoencoder,
                    inputs,
                    noise=self.noise,
                    epochs=count,
                    batch_size=batch_size,
                    learning_rate=learning_rate,
                )
                for autoencoder in made
                if isinstance(autoencoder, Autoencoder)
            ]
        # What the mean image would leave.
        spread = float(to_unit(inputs, self.bounds).var(0, correction=0).mean())
        for position, found in enumerate(errors):
            if len(inputs) > 1 and found[-1] >= spread:
                logger.warning(
                    "detector MagNetDetector: autoencoder %d reconstructs training images no better than their mean "
                    "would (mean squared error %.3g, variance %.3g); train longer",
                    position,
                    found[-1],
                    spread,
                )
        self.channels, self.autoencoders = inputs.shape[1], made.requires_grad_(False)
        self._take_limits(inputs, 0.05, batch_size)
        return errors

    def parts(self, x: Tensor) -> Tensor:
        """The parts of images ``(N, C, H, W)``, ``(N, parts)``: errors first, then divergences; with gradients."""
        return self.parts_of(observe(self.classifier, x))

    def parts_of(self, seen: Observation) -> Tensor:
        """The parts of a forward pass, ``(N, parts)``, with gradients; a further one is made for divergences.

        Raises:
            ModelError: The detector is not fitted, or to other images.
        """
        if not len(self.autoencoders):
            self._check_fitted()
        x = seen.inputs
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise ModelError(
                f"detector MagNetDetector: was fitted to images of {self.channels} channels, and meets inputs of shape "
                f"{tuple(x.shape)}"
            )
        rebuilt = [autoencoder(x) for autoencoder in self.autoencoders]
        found = [
            (to_unit(x, self.bounds) - to_unit(other, self.bounds)).abs().pow(power).flatten(1).mean(1)
            for other, power in zip(rebuilt, self.powers, strict=True)
        ]
        if self.temperatures:
            logits = self.classifier(rebuilt[self.reformer])
            found += [jensen_shannon(seen.logits / t, logits / t) for t in self.temperatures]
        return torch.stack(found, 1)

    def score_of(self, seen: Observation) -> Tensor:
        """The largest part in units of its limit, ``(N,)``.

        Raises:
            ModelError: The detector is not fitted, or to other images.
        """
        self._check_fitted()
        return (self.parts_of(seen) / self.limits).amax(1)

    def calibrate(
        self,
        inputs: Tensor,
        *,
        false_positive_rate: float = 0.05,
        per_class: bool = False,
        batch_size: int = 256,
    ) -> Calibration:
        """Set the limits of all parts, and the threshold of their maximum; see :meth:`Detector.calibrate`.

        Args:
            inputs: Clean images that the autoencoders were not trained on.
            false_positive_rate: The share, in (0, 1), that each part alone exceeds, and that the maximum exceeds.
            per_class: One threshold of the maximum for each predicted class; limits are common to all classes.
            batch_size: Images scored at once.

        Raises:
            InvalidArgumentError: There are too few images to tell that share from none.
            ModelError: The detector is not fitted, or scores are NaN or all the same.
        """
        check_number(
            "false_positive_rate", false_positive_rate, minimum=0, maximum=1, open_minimum=True, open_maximum=True
        )
        check_integer("batch_size", batch_size, minimum=1)
        self._check_fitted()
        before = self.limits
        try:
            if isinstance(inputs, Tensor) and len(inputs):
                self._take_limits(inputs, false_positive_rate, batch_size)
            return super().calibrate(
                inputs, false_positive_rate=false_positive_rate, per_class=per_class, batch_size=batch_size
            )
        except Exception:
            # The threshold that is kept belongs to the limits that it was set with.
            self.limits = before
            raise

    def _check_fitted(self) -> None:
        if not self.limits.numel():
            raise ModelError("detector MagNetDetector: is not fitted; call fit(clean_training_inputs) first")

    def _make(self, channels: int) -> nn.ModuleList:
        made = [Autoencoder(structure, channels=channels, bounds=self.bounds) for structure in self.structures]
        return nn.ModuleList(made).eval().requires_grad_(False)

    def _take_limits(self, inputs: Tensor, rate: float, batch_size: int) -> None:
        device = module_device(self.classifier)
        with torch.no_grad():
            parts = torch.cat([self.parts(batch.to(device)) for batch in torch.split(inputs, batch_size)])
        if not bool(torch.isfinite(parts).all()):
            raise ModelError("detector MagNetDetector: errors or divergences of clean inputs are not finite")
        exceeding = min(int(rate * len(parts) + 1e-9), len(parts) - 1)
        self.limits = parts.sort(0, descending=True).values[exceeding].clamp_min(_ROUNDING)
