"""ML-LOO: how unevenly single input values matter to the units of several layers.

Yang, Chen, Hsieh, Wang, Jordan, "ML-LOO: Detecting Adversarial Examples with Feature Attribution" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from robust_ext.core.modules import module_class
from robust_ext.core.random import stream
from robust_ext.core.settings import LARGEST, LARGEST_SEED, setting
from robust_ext.core.validation import check_integer
from robust_ext.detectors._features.layers import check_names
from robust_ext.detectors._features.regression import MEASURES, RegressionDetector
from robust_ext.detectors.observation import Observation, observe, repeatable
from robust_ext.detectors.training import check_kinds


@module_class
class MLLOODetector(RegressionDetector):
    """Logistic regression on the dispersion of leave-one-out attributions (Yang et al. 2020).

    The attribution of input value i to a unit u is ``u(x) - u(x_(i))``, where ``x_(i)`` is x with that value blanked.
    One feature a unit is the dispersion of its attributions over i; it is the same as that of ``u(x_(i))`` itself,
    because all measures ignore a shift. Units are those of the named layers and, last, the output for the class that is
    predicted for x. The score is the regression's log-odds: above 0 where an input is likelier adversarial.

    An input with D values costs D + 1 forward passes, in batches; ``patch`` and ``stride`` lower that. Where gradients
    need several passes, a pass is repeated on the way back, so that memory stays that of one.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> clean, _ = load_dataset("digits", split="train").take(range(20))
        >>> detector = MLLOODetector(digits_network(), layers=["1", "6"])
        >>> detector.features(clean).shape
        torch.Size([20, 145])
        >>> detector.fit(clean, 1 - clean)
        >>> bool(detector.score(1 - clean).mean() > detector.score(clean).mean())
        True
    """

    layers: Sequence[str] = setting(
        help="Names of hidden layers, as in ``classifier.named_modules()``; the paper takes seven.", check=check_names
    )
    dispersion: str = setting(
        default="iqr",
        help='``"iqr"``, the interquartile range, as the authors\' experiments; ``"std"``, the standard deviation; '
        '``"mad"``, the median absolute deviation from the median.',
        choices=tuple(MEASURES),
    )
    output: str = setting(
        default="probability",
        help='Whether the last unit is the ``"probability"`` of the predicted class, or its ``"logit"``, which still '
        "moves where the probability is 1 in floating point.",
        choices=("probability", "logit"),
    )
    fill: float = setting(
        default=0.0,
        help="Value of a blanked input, in units of the inputs: black. Where most of a clean image is black, most "
        "attributions are 0, so that the score shows little but whether the background was touched; grey avoids "
        "that.",
        minimum=-LARGEST,
    )
    patch: int = setting(
        default=1,
        help="Side of the squares, within one channel, that are blanked at once; at the far edges they are cut off. 1 "
        "is as published.",
        minimum=1,
    )
    stride: int | None = setting(
        default=None, help="Values from one square to the next; ``patch`` when left out.", minimum=1
    )
    units: int | None = setting(
        default=None, help="Most units of a layer, drawn at random when it has more; None for all.", minimum=1
    )
    pool: bool = setting(
        default=True,
        help="Whether a channel of a feature map is one unit, its mean, as in the authors' code, or each value is one.",
    )
    group: bool = setting(default=False, help="Whether there is only one feature a layer, the mean over its units.")
    seed: int = setting(default=0, help="Seed of the draw of units.", minimum=0, maximum=LARGEST_SEED)
    batch_size: int = setting(default=1024, help="Most blanked inputs in one pass.", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stride = self.stride or self.patch
        # Drawn at the first pass, and kept: another version of torch may draw others.
        for position in range(len(self.layers)):
            self.register_buffer(f"chosen_{position}", torch.empty(0, dtype=torch.int64))

    def fit(self, clean: Tensor, adversarial: Tensor, *, folds: int = 5) -> None:
        """Fit the logistic regression on standardised features, with the penalty of the best cross-validated accuracy.

        See :class:`Detector`; the authors' code takes a few hundred inputs. Both kinds weigh the same in total.
        ``folds``, at least 2, are those of the cross-validation, and no more than inputs of either kind.
        """
        check_integer("folds", folds, minimum=2)
        kinds = check_kinds(clean, adversarial, fewest=folds, reason="folds = ")
        negatives, positives = (torch.cat(self.over_batches(kind, self.features_of)) for kind in kinds)
        self.regression.fit([negatives], positives, folds=folds)

    def features(self, x: Tensor) -> Tensor:
        """The leave-one-out features of inputs ``(N, ...)``, see :meth:`features_of`."""
        return self.features_of(observe(self.classifier, x))

    def features_of(self, observed: Observation) -> Tensor:
        """The leave-one-out features of a forward pass, ``(N, F)``, with gradients; further passes are made.

        These are the units of the layers, in order, and the output for the predicted class.
        """
        x, predicted = observed.inputs, observed.predicted
        squares = squares_of(x, stride=self.stride or self.patch)
        several = torch.is_grad_enabled() and x.requires_grad and len(x) * len(squares) > self.batch_size
        size = max(1, self.batch_size // len(squares))
        pairs = zip(torch.split(x, size), torch.split(predicted, size), strict=True)
        return torch.cat([repeatable(several, self._dispersions, *pair, squares) for pair in pairs])

    def _dispersions(self, x: Tensor, predicted: Tensor, squares: Tensor) -> Tensor:
        """Features of a few inputs, ``(n, F)``."""
        size = max(1, self.batch_size // max(1, len(x)))
        parts = torch.split(squares, size)
        several = len(parts) > 1 and torch.is_grad_enabled() and x.requires_grad
        passes = [repeatable(several, self._blanked_units, x, predicted, part) for part in parts]
        features = []
        for layer in zip(*passes, strict=True):
            spread = MEASURES[self.dispersion](torch.cat(layer, 2))
            features.append(spread.mean(1, keepdim=True) if self.group else spread)
        return torch.cat(features, 1)

    def _blanked_units(self, x: Tensor, predicted: Tensor, squares: Tensor) -> tuple[Tensor, ...]:
        """Units of every layer with each square blanked, ``(n, units, squares)`` each."""
        count = len(squares)
        observed = observe(self.classifier, blanked(x, squares, patch=self.patch, fill=self.fill), self.layers)
        units = [observed.units(name, pool=self.pool) for name in self.layers]
        layers = [self._pick(position, values) for position, values in enumerate(units)]
        values = observed.logits.softmax(1) if self.output == "probability" else observed.logits
        layers.append(values.gather(1, predicted.repeat_interleave(count)[:, None]))
        return tuple(layer.view(len(x), count, layer.shape[1]).transpose(1, 2) for layer in layers)

    def _pick(self, position: int, values: Tensor) -> Tensor:
        """Return the examined units of a layer's ``(n, all)``."""
        if self.units is None or values.shape[1] <= self.units:
            return values
        chosen: Tensor = getattr(self, f"chosen_{position}")
        if not len(chosen):
            order = torch.randperm(values.shape[1], generator=stream(self.seed, position, "ml-loo units"))
            chosen = order[: self.units].sort().values.to(values.device)
            setattr(self, f"chosen_{position}", chosen)
        return values[:, chosen]


def squares_of(x: Tensor, *, stride: int) -> Tensor:
    """Channel, row and column where the squares of inputs ``(N, ...)`` begin, each in one channel, int64 ``(P, 3)``.

    The last two dimensions are rows and columns, and what leads them channels; vectors are one row.
    """
    channels, rows, columns = _image_shape(x)
    starts = (torch.arange(channels), torch.arange(0, rows, stride), torch.arange(0, columns, stride))
    return torch.cartesian_prod(*starts).to(x.device)


def blanked(x: Tensor, squares: Tensor, *, patch: int, fill: float) -> Tensor:
    """Inputs ``(N, ...)`` with each of the squares ``(P, 3)`` blanked, cut off at the edges, ``(N * P, ...)``.

    All squares of the first input come first, then all of the second, and so on.
    """
    shape = _image_shape(x)
    inside = torch.ones(len(squares), *shape, dtype=torch.bool, device=x.device)
    for dimension, (length, side) in enumerate(zip(shape, (1, patch, patch), strict=True)):
        index = torch.arange(length, device=x.device)
        first = squares[:, dimension, None]
        view = [-1, 1, 1, 1]
        view[dimension + 1] = length
        inside &= ((index >= first) & (index < first + side)).view(view)
    return torch.where(inside.view(1, -1, *x.shape[1:]), fill, x[:, None]).flatten(0, 1)


def _image_shape(x: Tensor) -> tuple[int, int, int]:
    """Channels, rows and columns of one input."""
    shape = (1, 1, *x.shape[1:])
    return math.prod(shape[:-2]), shape[-2], shape[-1]
