"""Feature squeezing: whether the prediction survives the loss of detail.

Xu, Evans, Qi, "Feature Squeezing: Detecting Adversarial Examples in Deep Neural Networks" (2018), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import module_class
from robust_ext.core.settings import setting
from robust_ext.core.validation import check_bounds, check_choice
from robust_ext.detectors._features.squeezers import BitDepth, Median, NonLocalMeans, OpenCVNonLocalMeans, Squeezer
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation

SQUEEZERS: dict[str, Callable[..., Squeezer]] = {
    kind.kind: kind for kind in (BitDepth, Median, NonLocalMeans, OpenCVNonLocalMeans)
}
PRESETS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "mnist": (("bit_depth", {"bits": 1}), ("median", {"size": 2})),
    "cifar10": (
        ("bit_depth", {"bits": 5}),
        ("median", {"size": 2}),
        ("opencv_non_local_means", {"search": 13, "patch": 3, "strength": 2}),
    ),
}


def _check_squeezers(value: Any) -> Sequence[Any]:
    chosen = PRESETS[check_choice("squeezers", value, tuple(PRESETS))] if isinstance(value, str) else value
    if not isinstance(chosen, (list, tuple)) or not chosen:
        raise InvalidArgumentError("squeezers", chosen, "the name of a choice, or a list of squeezers")
    return chosen


@module_class
class FeatureSqueezingDetector(Detector):
    """The largest change of the probabilities under squeezers (Xu et al. 2018).

    With p the softmax of the logits, the score is the maximum over squeezers s of ``||p(x) - p(s(x))||_1``, from 0 to
    2: adversarial examples live on detail that squeezers remove. All squeezed inputs go through the classifier in one
    pass, unless they are more than ``batch_size``.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> clean, _ = load_dataset("digits").take(range(100))
        >>> detector = FeatureSqueezingDetector(digits_network(), squeezers=[("bit_depth", {"bits": 2})])
        >>> noisy = (clean + 0.5 * torch.rand(clean.shape)).clamp(0, 1)
        >>> bool(detector.score(noisy).mean() > detector.score(clean).mean())
        True
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {name: {"squeezers": name} for name in PRESETS}

    squeezers: Sequence[Any] = setting(
        help='The name of a published choice: ``"mnist"`` (1 bit; 2 x 2 median) or ``"cifar10"`` (5 bits; 2 x 2 '
        "median; non-local means 13-3-2 by OpenCV). Or a list of any of these: a pair of a name "
        '(``"bit_depth"``, ``"median"``, ``"non_local_means"``, ``"opencv_non_local_means"``) and its settings, as in '
        '``("bit_depth", {"bits": 3})``; a squeezer, as :class:`~robust_ext.detectors.BitDepth`; a callable from '
        "inputs ``(N, ...)`` to squeezed ones of the same shape, whose attributes ``differentiable`` (True when it has "
        "none) and ``random`` (False) count.",
        check=_check_squeezers,
    )
    bounds: tuple[float, float] = setting(
        default=(0.0, 1.0), help="Bounds of the inputs, which named squeezers use too.", check=check_bounds
    )
    straight_through: bool = setting(
        default=True,
        help="Whether squeezers that are not differentiable, such as rounding, have the gradient of the identity "
        "(backward pass differentiable approximation), as an attack on the detector needs it. Otherwise their "
        "gradient is 0, which is right almost everywhere and hides the detector. Scores are the same.",
    )
    batch_size: int = setting(default=2048, help="Most squeezed inputs in one pass.", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.squeezers = [_make(squeezer, self.bounds) for squeezer in self.squeezers]
        # Modules move with the detector.
        self.modules_of_squeezers = nn.ModuleList(s for s in self.squeezers if isinstance(s, nn.Module))
        self.random = any(bool(getattr(squeezer, "random", False)) for squeezer in self.squeezers)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor; squeezers by name, and callables by ``repr``."""
        squeezers = [[s.kind, s.settings] if _is_named(s) else repr(s) for s in self.squeezers]
        return {**super().settings, "squeezers": squeezers}

    def distances_of(self, observed: Observation) -> Tensor:
        """Return the l1 change of each input's probabilities by each squeezer, ``(N, squeezers)``, with gradients."""
        squeezed = torch.cat([self._squeeze(squeezer, observed.inputs) for squeezer in self.squeezers])
        logits = torch.cat([self.classifier(part) for part in torch.split(squeezed, self.batch_size)])
        after = logits.softmax(1).view(len(self.squeezers), *observed.logits.shape)
        return (observed.logits.softmax(1) - after).abs().sum(2).T

    def score_of(self, observed: Observation) -> Tensor:
        """The largest distance, ``(N,)``."""
        return self.distances_of(observed).amax(1)

    def packed(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """The settings and the threshold; ModelError where a squeezer is code of its user."""
        foreign = [repr(squeezer) for squeezer in self.squeezers if not _is_named(squeezer)]
        if foreign:
            raise self.error(f"no file can hold your squeezers ({', '.join(foreign)}); {self.remake()}")
        return super().packed()

    def _squeeze(self, squeezer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        approximate = self.straight_through and not getattr(squeezer, "differentiable", True)
        squeezed = squeezer(x.detach() if approximate else x)
        if not isinstance(squeezed, Tensor) or squeezed.shape != x.shape or squeezed.dtype != x.dtype:
            shown = f"{squeezed.dtype} {tuple(squeezed.shape)}" if isinstance(squeezed, Tensor) else type(squeezed)
            raise self.error(f"squeezer {squeezer!r} returned {shown}, expected {x.dtype} {tuple(x.shape)}")
        # The second part is 0, so that the squeezed values are exactly what they were.
        return squeezed.detach() + (x - x.detach()) if approximate else squeezed


def _make(squeezer: Any, bounds: tuple[float, float]) -> Callable[[Tensor], Tensor]:
    if isinstance(squeezer, (list, tuple)) and len(squeezer) == 2 and isinstance(squeezer[1], dict):
        kind = check_choice("squeezers", squeezer[0], tuple(SQUEEZERS))
        try:
            return SQUEEZERS[kind](**{"bounds": bounds, **squeezer[1]})
        except TypeError as error:
            raise InvalidArgumentError("squeezers", squeezer, f"settings of {kind} ({error})") from error
    if isinstance(squeezer, type) or not callable(squeezer):
        raise InvalidArgumentError("squeezers", squeezer, "a pair of a name and its settings, or a callable x -> x")
    if isinstance(squeezer, nn.Module) and squeezer.training and not isinstance(squeezer, Squeezer):
        got = f"{type(squeezer).__name__} in train mode"
        raise InvalidArgumentError("squeezers", got, "a squeezer in eval mode; call its eval() first")
    made: Callable[[Tensor], Tensor] = squeezer
    return made


def _is_named(squeezer: object) -> TypeGuard[Squeezer]:
    return isinstance(squeezer, Squeezer) and type(squeezer) in SQUEEZERS.values()
