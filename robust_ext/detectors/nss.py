"""NSS: natural scene statistics, and a support vector machine that separates clean from adversarial ones.

Kherchouche, Fezza, Hamidouche, Déforges, "Detection of Adversarial Examples in Deep Neural Networks with Natural Scene
Statistics" (2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robust_ext.core.errors import MissingDependencyError
from robust_ext.core.modules import buffer, module_class
from robust_ext.core.settings import setting
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_bounds, check_integer, to_unit
from robust_ext.detectors._features.naturalness import natural_features
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation
from robust_ext.detectors.training import TrainingSet, check_kinds

# Of the probability: the cross-validation on which the sigmoid is fitted.
_FOLDS = 5


@module_class
class NSSDetector(Detector):
    """A support vector machine on 18 natural scene statistics of the image (Kherchouche et al. 2020).

    The features are those of ``natural_features``, scaled to [-1, 1] by their lowest and highest training values;
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
        help="Of the inputs; the features are those of the images scaled to [0, 1].",
        check=check_bounds,
    )
    output: str = setting(
        default="decision",
        help='``"decision"``, or ``"probability"``: the decision value through a sigmoid that is fitted to '
        "cross-validated ones. Both rank inputs alike; the probability may round to 0 or 1.",
        choices=("decision", "probability"),
    )
    penalty: float = setting(default=10.0, help="C of the support vector machine.", above=0)
    gamma: float = setting(default=0.01, help="Of its sigmoid kernel.", above=0)
    lowest: Tensor = buffer("Of each feature in training, float64 ``(18,)``; empty until fitted.", dtype=torch.float64)
    highest: Tensor = buffer("Likewise.", dtype=torch.float64)
    vectors: Tensor = buffer("Support vectors, float64 ``(V, 18)``.", dtype=torch.float64)
    weights: Tensor = buffer("Their dual coefficients, float64 ``(V,)``.", dtype=torch.float64)
    bias: Tensor = buffer("The intercept, float64 ``()``.", dtype=torch.float64)
    slope: Tensor = buffer("Of the sigmoid, and its shift, float64 ``(2,)``; for probabilities.", dtype=torch.float64)

    def fit(self, clean: Tensor, adversarial: Tensor, *, batch_size: int = 256) -> None:
        """Fit the support vector machine. Each input weighs the same: give about as many of both kinds.

        Args:
            clean: Clean training images ``(N, C, H, W)`` of one or three channels, floating point, in the bounds.
            adversarial: Adversarial ones ``(M, C, H, W)``, made by the attacks to detect. The detector's
                comparisons take PGD in the linf ball of 1/32 on training images.
            batch_size: Images of which the features are taken at once.

        Raises:
            InvalidArgumentError: These are no such tensors.
            MissingDependencyError: scikit-learn is not installed.
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
