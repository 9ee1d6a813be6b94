"""NSS: natural scene statistics, and a support vector machine that separates clean from adversarial ones.

Kherchouche, Fezza, Hamidouche, Déforges, "Detection of Adversarial Examples in Deep Neural Networks with Natural Scene
Statistics" (2020); the statistics are those of Mittal, Moorthy, Bovik, "No-Reference Image Quality Assessment in the
Spatial Domain" (2012).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.modules import buffer, module_class
from robust_ext.core.settings import setting
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_bounds, check_integer, to_unit
from robust_ext.detectors._features.regression import root
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation
from robust_ext.detectors.training import TrainingSet, check_kinds

# Of the probability: the cross-validation on which the sigmoid is fitted.
_FOLDS = 5


@module_class
class NSSDetector(Detector):
    """A support vector machine on 18 natural scene statistics of the image (Kherchouche et al. 2020).

    The features are those of :func:`natural_features`, scaled to [-1, 1] by their lowest and highest training values;
    beyond these they are not clipped. The score is the machine's decision value ``sum_i d_i tanh(gamma s_i . f) + b``:
    above 0 where it classifies an input as adversarial. The classifier plays no part in it. Gradients are exact where
    no coefficient changes its sign.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> clean, _ = load_dataset("digits", split="train").take(range(100))
        >>> noisy = (clean + 0.2 * torch.rand(clean.shape).round()).clamp(0, 1)
        >>> detector = NSSDetector(digits_network())
        >>> detector.fit(clean, noisy)
        >>> bool(detector.score(noisy).mean() > detector.score(clean).mean())
        True
    """

    supervised = True

    bounds: tuple[float, float] = setting(
        default=(0.0, 1.0),
        help="Bounds of the inputs; the features are those of the images scaled to [0, 1].",
        check=check_bounds,
    )
    output: str = setting(
        default="decision",
        help='``"decision"``, or ``"probability"``: the decision value through a sigmoid that is fitted to '
        "cross-validated ones. Both rank inputs alike; the probability may round to 0 or 1.",
        choices=("decision", "probability"),
    )
    penalty: float = setting(default=10.0, help="C of the support vector machine.", above=0)
    gamma: float = setting(default=0.01, help="Gamma of its sigmoid kernel.", above=0)
    lowest: Tensor = buffer("Of each feature in training, float64 ``(18,)``; empty until fitted.", dtype=torch.float64)
    highest: Tensor = buffer("Likewise.", dtype=torch.float64)
    vectors: Tensor = buffer("Support vectors, float64 ``(V, 18)``.", dtype=torch.float64)
    weights: Tensor = buffer("Their dual coefficients, float64 ``(V,)``.", dtype=torch.float64)
    bias: Tensor = buffer("The intercept, float64 ``()``.", dtype=torch.float64)
    slope: Tensor = buffer("Of the sigmoid, and its shift, float64 ``(2,)``; for probabilities.", dtype=torch.float64)

    def fit(self, clean: Tensor, adversarial: Tensor, *, batch_size: int = 256) -> None:
        """Fit the support vector machine on images ``(N, C, H, W)`` of one or three channels; see :class:`Detector`.

        Each input weighs the same: give about as many of both kinds. The detector's comparisons take PGD in the linf
        ball of 1/32.
        """
        check_integer("batch_size", batch_size, minimum=1)
        kinds = check_kinds(clean, adversarial, fewest=1 if self.output == "decision" else _FOLDS, bounds=self.bounds)
        device = module_device(self.classifier)
        with torch.no_grad():
            parts = [self.features(part.to(device)) for kind in kinds for part in torch.split(kind, batch_size)]
        rows = torch.cat(parts)
        lowest, highest = rows.amin(0), rows.amax(0)
        targets = (torch.arange(len(rows)) >= len(kinds[0])).long()
        fitted = self._machine(_scaled(rows, lowest, highest).cpu(), targets)
        self.lowest, self.highest = lowest, highest
        for name, value in fitted.items():
            setattr(self, name, value.to(rows.device))

    def fit_to(self, data: TrainingSet, settings: Mapping[str, Any], *, seed: int) -> None:
        """Fit it on drawn rows."""
        chosen, _ = data.split(seed)
        self.fit(data.clean[chosen], data.adversarial_of(chosen, self.classifier), **settings)

    def features(self, x: Tensor) -> Tensor:
        """The natural scene statistics of images ``(N, C, H, W)``, unscaled, float64 ``(N, 18)``, with gradients."""
        return natural_features(to_unit(x, self.bounds))

    def score_of(self, observed: Observation) -> Tensor:
        """The decision value or probability, ``(N,)``."""
        self.check_fitted(self.vectors.numel())
        rows = _scaled(self.features(observed.inputs), self.lowest.double(), self.highest.double())
        decision = (self.gamma * rows @ self.vectors.double().T).tanh() @ self.weights.double() + self.bias.double()
        if self.output == "probability":
            slope, shift = self.slope.double()
            decision = (slope * decision + shift).sigmoid()
        return decision.to(observed.inputs.dtype)

    def _machine(self, rows: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The buffers of a machine fitted to scaled features."""
        try:
            from sklearn.calibration import CalibratedClassifierCV
            from sklearn.svm import SVC
        except ImportError as error:
            raise MissingDependencyError('NSSDetector.fit needs scikit-learn: pip install "robust-ext[cli]"') from error
        machine = SVC(C=self.penalty, kernel="sigmoid", gamma=self.gamma)
        line: tuple[float, ...] = ()
        if self.output == "probability":
            calibrated = CalibratedClassifierCV(machine, method="sigmoid", ensemble=False, cv=_FOLDS)
            found = calibrated.fit(rows.numpy(), targets.numpy()).calibrated_classifiers_[0]
            machine = found.estimator
            # Its probability is 1 / (1 + exp(a f + b)).
            line = (-float(found.calibrators[0].a_), -float(found.calibrators[0].b_))
        else:
            machine.fit(rows.numpy(), targets.numpy())
        return {
            "vectors": torch.tensor(machine.support_vectors_),
            "weights": torch.tensor(machine.dual_coef_[0]),
            "bias": torch.tensor(float(machine.intercept_[0]), dtype=torch.float64),
            "slope": torch.tensor(line, dtype=torch.float64),
        }


def _scaled(features: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """Features as numbers that are in [-1, 1] for those in training; -1 for one that did not vary."""
    span = highest - lowest
    return 2 * (features - lowest) / torch.where(span > 0, span, 1) - 1


# The shapes of the table that this fit is commonly read from end at 10; sparse images need lower ones than its 0.2.
LOWEST_SHAPE, HIGHEST_SHAPE = 0.1, 10.0
_HALVINGS = 50


class Aggd(NamedTuple):
    """Fitted distributions, ``(N,)`` each.

    ``shape`` is alpha (1 for a Laplace, 2 for a normal distribution), ``mean`` eta, ``left`` the variance about 0 of
    the values below 0, and ``right`` that of the others.
    """

    shape: Tensor
    mean: Tensor
    left: Tensor
    right: Tensor


def fit_aggd(values: Tensor) -> Aggd:
    """Fit one distribution to each row of values ``(N, M)`` by moment matching, with gradients; float64 is advisable.

    With s_l and s_r the root mean squares of the values below 0 and of the others, and g = s_l / s_r, the shape solves
    ``Gamma(2/a)^2 / (Gamma(1/a) Gamma(3/a)) = mean|v|^2 / mean(v^2) * (g^3 + 1)(g + 1) / (g^2 + 1)^2``. The left side
    grows from 0 to 3/4 and no further, and the right side may lie above: the shape is kept in [0.1, 10], where it has
    no gradient at the ends. A side without values has variance 0, and a row of zeros the lowest shape. The gradient
    ignores that values may change sides.
    """
    squares = values.square()
    below = values < 0
    left, right = (torch.where(side, squares, 0).sum(1) / side.sum(1).clamp_min(1) for side in (below, ~below))
    s_l, s_r = root(left), root(right)
    # The factor in g, multiplied by s_r^4, has no quotient that fails where the right side is empty.
    ratio = _quotient(values.abs().mean(1).square(), squares.mean(1))
    ratio = ratio * _quotient((s_l**3 + s_r**3) * (s_l + s_r), (left + right).square())
    shape: Tensor = _Shape.apply(ratio)  # type: ignore[no-untyped-call]
    scale = (0.5 * (torch.lgamma(1 / shape) - torch.lgamma(3 / shape))).exp()
    mean = (s_r - s_l) * scale * (torch.lgamma(2 / shape) - torch.lgamma(1 / shape)).exp()
    return Aggd(shape, mean, left, right)


class _Shape(torch.autograd.Function):
    """The shape whose moment ratio is given, by bisection; its derivative is that of the inverse function."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, ratio: Tensor) -> Tensor:
        low = torch.full_like(ratio, math.log(LOWEST_SHAPE))
        high = torch.full_like(ratio, math.log(HIGHEST_SHAPE))
        inside = (ratio > _log_ratio(low.exp()).exp()) & (ratio < _log_ratio(high.exp()).exp())
        target = ratio.log()
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = _log_ratio(middle.exp()) < target
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        shape = ((low + high) / 2).exp()
        ctx.save_for_backward(shape, ratio, inside)
        return shape

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        shape, ratio, inside = ctx.saved_tensors
        slope = torch.digamma(1 / shape) + 3 * torch.digamma(3 / shape) - 4 * torch.digamma(2 / shape)
        return torch.where(inside, gradient * shape.square() / (slope * torch.where(inside, ratio, 1)), 0)


def _log_ratio(shape: Tensor) -> Tensor:
    return 2 * torch.lgamma(2 / shape) - torch.lgamma(1 / shape) - torch.lgamma(3 / shape)


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """The quotient, and 0 where the denominator is 0."""
    return torch.where(below > 0, above / torch.where(below > 0, below, 1), 0)


WINDOW, SIGMA = 7, 7 / 6
# Of one of 256 grey levels, for numbers in [0, 1].
CONSTANT = 1 / 255
# ITU-R BT.709.
_GREY = (0.2125, 0.7154, 0.0721)
# Far below what a float32 image can show, far above the rounding errors of float64.
_NOTHING = 1e-12


def grey_of(x: Tensor) -> Tensor:
    """Images ``(N, C, H, W)`` of one or three channels (red, green, blue) as grey ones, float64 ``(N, H, W)``.

    InvalidArgumentError: they are of another shape, or below 2 x 2.
    """
    if x.dim() != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) < 2:
        expected = "images (N, C, H, W) of one or three channels, with H and W of at least 2; else another detector"
        raise InvalidArgumentError("inputs", f"shape {tuple(x.shape)}", expected)
    wide = x.double()
    if x.shape[1] == 1:
        return wide[:, 0]
    return torch.einsum("nchw,c->nhw", wide, wide.new_tensor(_GREY))


def contrast_of(grey: Tensor) -> Tensor:
    """Mean-subtracted contrast-normalised coefficients of images ``(N, H, W)`` in [0, 1], of the same shape.

    ``(I - mu) / (sigma + 1/255)``, with mu and ``sigma = sqrt(|mu^2 - mean of I^2|)`` over a Gaussian window of 7 x 7
    with standard deviation 7/6, beyond the edges of which the image is black.
    """
    offsets = torch.arange(WINDOW, dtype=grey.dtype, device=grey.device) - WINDOW // 2
    line = (-offsets.square() / (2 * SIGMA**2)).exp()
    window = torch.outer(line, line)[None, None] / line.sum() ** 2
    both = torch.cat([grey, grey.square()])[:, None]
    mean, square = nn.functional.conv2d(both, window, padding=WINDOW // 2).squeeze(1).chunk(2)
    deviation = root((mean.square() - square).abs(), above=_NOTHING)
    difference = grey - mean
    # In flat regions rounding would decide on which side of 0 a coefficient counts.
    difference = difference - torch.where(difference.abs() < _NOTHING, difference, 0).detach()
    return difference / (deviation + CONSTANT)


def natural_features(x: Tensor) -> Tensor:
    """The 18 features of images ``(N, C, H, W)`` in [0, 1], 1 or 3 channels, float64 ``(N, 18)``, with gradients.

    Of the coefficients: shape, and mean of the left and right variance; then of their products with the right, lower,
    lower right and lower left neighbour: shape, mean, left and right variance.
    """
    field = contrast_of(grey_of(x))
    own = fit_aggd(field.flatten(1))
    features = [own.shape, (own.left + own.right) / 2]
    for first, second in (
        (field[:, :, :-1], field[:, :, 1:]),
        (field[:, :-1], field[:, 1:]),
        (field[:, :-1, :-1], field[:, 1:, 1:]),
        (field[:, 1:, :-1], field[:, :-1, 1:]),
    ):
        features += fit_aggd((first * second).flatten(1))
    return torch.stack(features, 1)
