"""Logistic regression on features of inputs, and detectors that are one; measures of dispersion."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError, ModelError
from robust_ext.core.modules import SettingsModule, buffer, module_class
from robust_ext.core.settings import setting
from robust_ext.core.validation import check_integer
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation


def quantile(values: Tensor, share: float) -> Tensor:
    """The quantile of a share in [0, 1] along the last dimension, ``(..., n)`` to ``(...)``, linearly interpolated."""
    return _between(values.sort(-1).values, share)


def interquartile_range(values: Tensor) -> Tensor:
    """The quantile of 0.75 minus that of 0.25 along the last dimension, ``(..., n)`` to ``(...)``."""
    ordered = values.sort(-1).values
    return _between(ordered, 0.75) - _between(ordered, 0.25)


def median_absolute_deviation(values: Tensor) -> Tensor:
    """The median distance from the median along the last dimension, ``(..., n)`` to ``(...)``."""
    return quantile((values - quantile(values, 0.5)[..., None]).abs(), 0.5)


def standard_deviation(values: Tensor) -> Tensor:
    """The root mean square distance from the mean along the last dimension, ``(..., n)`` to ``(...)``."""
    return root(values.var(-1, correction=0))


def root(values: Tensor, *, above: float = 0.0) -> Tensor:
    """The square root of values above a limit, and 0 of others, where its gradient is 0 instead of infinity."""
    return torch.where(values > above, torch.where(values > above, values, 1).sqrt(), 0)


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "iqr": interquartile_range,
    "std": standard_deviation,
    "mad": median_absolute_deviation,
}


def _between(ordered: Tensor, share: float) -> Tensor:
    position = share * (ordered.shape[-1] - 1)
    below = int(position)
    above = min(below + 1, ordered.shape[-1] - 1)
    return ordered[..., below].lerp(ordered[..., above], position - below)


@module_class
class Regression(SettingsModule):
    """Log-odds of a class, linear in scaled features; fitted by scikit-learn."""

    scaling: str = setting(
        default="standard",
        help='``"standard"``: features are centred and divided by their standard deviation; ``"minmax"``: moved to '
        "[0, 1]; over the rows it is fitted on. A feature that does not vary there is only shifted.",
        choices=("standard", "minmax"),
    )
    center: Tensor = buffer("What is subtracted from the features, ``(F,)``; empty until fitted.")
    scale: Tensor = buffer("What they are then divided by, ``(F,)``.")
    weight: Tensor = buffer("``(F,)``.")
    bias: Tensor = buffer("``()``.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training = False

    def fit(self, negatives: Sequence[Tensor], positives: Tensor, *, folds: int = 5) -> None:
        """Fit by cross-validated logistic regression, in which both classes weigh the same in total.

        ``negatives`` are features ``(N, F)`` of one class, in one or more parts; ``positives`` ``(M, F)`` those of the
        class whose log-odds are wanted; ``folds`` the parts of the cross-validation that chooses the strength of the
        penalty. ModelError: features are not finite.
        """
        check_integer("folds", folds, minimum=2)
        rows = torch.cat([*negatives, positives]).double()
        count = len(rows) - len(positives)
        if min(count, len(positives)) < folds:
            got = f"{folds} with {count} and {len(positives)} rows"
            raise InvalidArgumentError("folds", got, "no more folds than rows of either class")
        if not bool(torch.isfinite(rows).all()):
            bad = (~torch.isfinite(rows)).any(0).nonzero().flatten().tolist()
            raise ModelError(f"features of the training inputs are not finite (features {bad})")
        center, scale = rows.mean(0), rows.std(0, correction=0)
        if self.scaling == "minmax":
            center, scale = rows.amin(0), rows.amax(0) - rows.amin(0)
        # What varies by rounding alone does not vary.
        scale = torch.where(scale > 1e-12 * rows.abs().amax(0), scale, 1)
        try:
            from sklearn.linear_model import LogisticRegressionCV
        except ImportError as error:
            raise MissingDependencyError(
                'fitting a logistic regression needs scikit-learn: pip install "robust-ext[cli]"'
            ) from error
        with warnings.catch_warnings():
            # New versions announce other defaults, under names that old versions do not have.
            warnings.simplefilter("ignore", FutureWarning)
            model = LogisticRegressionCV(cv=folds, class_weight="balanced", scoring="accuracy", max_iter=2000)
            model.fit(((rows - center) / scale).cpu().numpy(), (torch.arange(len(rows)) >= count).numpy())
        self.center, self.scale = center.float(), scale.float()
        self.weight = torch.tensor(model.coef_[0], dtype=torch.float32, device=rows.device)
        self.bias = torch.tensor(float(model.intercept_[0]), device=rows.device)

    def forward(self, features: Tensor) -> Tensor:
        """The log-odds of features ``(N, F)``, ``(N,)``; above 0 where the class is the likelier one."""
        return ((features - self.center) / self.scale) @ self.weight + self.bias


@module_class
class RegressionDetector(Detector):
    """Logistic regression on features of inputs.

    Attributes:
        regression: On the features.
        scaling: Of the features, see ``Regression``.
    """

    supervised = True
    scaling: ClassVar[str] = "standard"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.regression = Regression(scaling=self.scaling)

    @abstractmethod
    def features_of(self, observed: Observation) -> Tensor:
        """The features of a forward pass, ``(N, F)``, with gradients."""

    def score_of(self, observed: Observation) -> Tensor:
        """The log-odds that the input is adversarial, ``(N,)``."""
        self.check_fitted(self.regression.weight.numel())
        features = self.features_of(observed)
        self.check_same(len(self.regression.weight), features.shape[1], "features")
        out: Tensor = self.regression(features)
        return out
