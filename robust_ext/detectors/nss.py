"""NSS: natural scene statistics, and a support vector machine that tells clean from adversarial ones.

Kherchouche, Fezza, Hamidouche, Déforges, "Detection of Adversarial Examples in Deep Neural Networks with Natural Scene
Statistics" (2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds, to_unit
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError, ModelError
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_choice, check_inputs, check_integer, check_number
from robust_ext.detectors._features.naturalness import natural_features
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation

OUTPUTS = ("decision", "probability")
# Of the probability: the cross-validation on which the sigmoid is fitted.
_FOLDS = 5


class NSSDetector(Detector):
    """A support vector machine on 18 natural scene statistics of the image (Kherchouche et al. 2020).

    The features are those of ``natural_features``, scaled to [-1, 1] by their
    lowest and highest training values; beyond these they are not clipped. The score is the machine's decision value
    ``sum_i d_i tanh(gamma s_i . f) + b``: above 0 where it holds an input for adversarial. The classifier plays no
    part in it. Gradients are exact where no coefficient changes its sign.

    Args:
        classifier: The network it watches.
        bounds: Of the inputs; the features are those of the images scaled to [0, 1].
        output: ``"decision"``, or ``"probability"``: the decision value through a sigmoid that is fitted to
            cross-validated ones. Both rank inputs alike; the probability may round to 0 or 1.
        penalty: C of the support vector machine.
        gamma: Of its sigmoid kernel.

    Attributes:
        lowest: Of each feature in training, float64 ``(18,)``; empty until fitted.
        highest: Likewise.
        vectors: Support vectors, float64 ``(V, 18)``.
        weights: Their dual coefficients, float64 ``(V,)``.
        bias: The intercept, float64 ``()``.
        slope: Of the sigmoid, and its shift, float64 ``(2,)``; only for probabilities.

    Raises:
        InvalidArgumentError: A setting is not accepted.

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

    lowest: Tensor
    highest: Tensor
    vectors: Tensor
    weights: Tensor
    bias: Tensor
    slope: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        *,
        bounds: Sequence[float] = (0.0, 1.0),
        output: str = "decision",
        penalty: float = 10.0,
        gamma: float = 0.01,
    ) -> None:
        super().__init__(classifier)
        self.bounds = check_bounds(bounds)
        self.output = check_choice("output", output, OUTPUTS)
        self.penalty = check_number("penalty", penalty, minimum=0, open_minimum=True)
        self.gamma = check_number("gamma", gamma, minimum=0, open_minimum=True)
        for name in ("lowest", "highest", "vectors", "weights", "bias", "slope"):
            self.register_buffer(name, torch.empty(0, dtype=torch.float64))

    @property
    def settings(self) -> dict[str, Any]:
        """What the constructor was given."""
        return {"bounds": list(self.bounds), "output": self.output, "penalty": self.penalty, "gamma": self.gamma}

    def fit(self, clean: Tensor, adversarial: Tensor, *, batch_size: int = 256) -> None:
        """Fit the support vector machine. Each input weighs the same: give about as many of both kinds.

        Args:
            clean: Clean training images ``(N, C, H, W)`` of one or three channels, floating point, in the bounds.
            adversarial: Adversarial ones ``(M, C, H, W)``, made by whatever attack is to be told apart. The detector's
                comparisons take PGD in the linf ball of 1/32 on training images.
            batch_size: Images of which the features are taken at once.

        Raises:
            InvalidArgumentError: These are no such tensors.
            MissingDependencyError: scikit-learn is not installed.
        """
        check_integer("batch_size", batch_size, minimum=1)
        fewest = 1 if self.output == "decision" else _FOLDS
        parts = []
        for name, inputs in (("clean", clean), ("adversarial", adversarial)):
            checked = check_inputs(name, inputs, bounds=self.bounds)
            if len(checked) < fewest:
                raise InvalidArgumentError(name, f"{len(checked)} inputs", f"at least {fewest} {name} inputs")
            device = module_device(self.classifier)
            with torch.no_grad():
                parts.append(torch.cat([self.features(batch.to(device)) for batch in torch.split(checked, batch_size)]))
        rows = torch.cat(parts)
        lowest, highest = rows.amin(0), rows.amax(0)
        targets = torch.cat([torch.full((len(part),), kind) for kind, part in enumerate(parts)])
        fitted = self._machine(_scaled(rows, lowest, highest).cpu(), targets)
        self.lowest, self.highest = lowest, highest
        for name, value in fitted.items():
            setattr(self, name, value.to(rows.device))

    def features(self, x: Tensor) -> Tensor:
        """The natural scene statistics of images ``(N, C, H, W)``, unscaled, float64 ``(N, 18)``, with gradients."""
        return natural_features(to_unit(x, self.bounds))

    def score_of(self, seen: Observation) -> Tensor:
        """The decision value or probability, ``(N,)``.

        Raises:
            ModelError: The detector is not fitted.
        """
        if not self.vectors.numel():
            raise ModelError("detector NSSDetector: is not fitted; call fit(clean_inputs, adversarial_inputs) first")
        rows = _scaled(self.features(seen.inputs), self.lowest.double(), self.highest.double())
        decision = (self.gamma * rows @ self.vectors.double().T).tanh() @ self.weights.double() + self.bias.double()
        if self.output == "probability":
            slope, shift = self.slope.double()
            decision = (slope * decision + shift).sigmoid()
        return decision.to(seen.inputs.dtype)

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
