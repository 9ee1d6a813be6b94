"""ML-LOO: how unevenly single input values matter to the units of several layers.

Yang, Chen, Hsieh, Wang, Jordan, "ML-LOO: Detecting Adversarial Examples with Feature Attribution" (2020).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError, ModelError
from robust_ext.core.random import stream
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_choice, check_inputs, check_integer, check_number
from robust_ext.detectors._features.blanking import blanked, squares_of
from robust_ext.detectors._features.dispersion import MEASURES
from robust_ext.detectors._features.units import units_of
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation, observe

OUTPUTS = ("probability", "logit")
_ANY = (-float("inf"), float("inf"))


class MLLOODetector(Detector):
    """Logistic regression on the dispersion of leave-one-out attributions (Yang et al. 2020).

    The attribution of input value i to a unit u is ``u(x) - u(x_(i))``, where ``x_(i)`` is x with that value blanked.
    One feature a unit is the dispersion of its attributions over i; it is the same as that of ``u(x_(i))`` itself,
    because all measures ignore a shift. Units are those of the named layers and, last, the output for the class that is
    predicted for x. The score is the regression's log-odds: above 0 where it holds an input for adversarial.

    An input with D values costs D + 1 forward passes, in batches; ``patch`` and ``stride`` lower that. Where gradients
    need several passes, a pass is repeated on the way back, so that memory stays that of one.

    Args:
        classifier: The network it watches.
        layers: Names of hidden layers, as in ``classifier.named_modules()``; the paper takes seven.
        dispersion: ``"iqr"``, the interquartile range, as the authors' experiments; ``"std"``, the standard deviation;
            ``"mad"``, the median absolute deviation from the median.
        output: Whether the last unit is the ``"probability"`` of the predicted class, or its ``"logit"``, which still
            moves where the probability is 1 in floating point.
        fill: What a blanked value becomes, in units of the inputs: black. Where most of a clean image is black, most
            attributions are 0, and the score tells little else than whether the background was touched; grey avoids
            that.
        patch: Side of the squares, within one channel, that are blanked at once; at the far edges they are cut off.
            1 is as published.
        stride: Values from one square to the next; ``patch`` when left out.
        units: Most units of a layer, drawn at random when it has more; None for all.
        pool: Whether a channel of a feature map is one unit, its mean, as in the authors' code, or each value is one.
        group: Whether there is only one feature a layer, the mean over its units.
        seed: Of the draw of units.
        batch_size: Most blanked inputs in one pass.

    Attributes:
        center: Mean of the features in training, ``(F,)``; empty until fitted.
        scale: Their standard deviation, ``(F,)``.
        weight: Of the regression on standardised features, ``(F,)``.
        bias: Its intercept, ``()``.

    Raises:
        InvalidArgumentError: A setting is not accepted.

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

    center: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        *,
        layers: Sequence[str],
        dispersion: str = "iqr",
        output: str = "probability",
        fill: float = 0.0,
        patch: int = 1,
        stride: int | None = None,
        units: int | None = None,
        pool: bool = True,
        group: bool = False,
        seed: int = 0,
        batch_size: int = 1024,
    ) -> None:
        super().__init__(classifier)
        if isinstance(layers, str) or not all(isinstance(name, str) for name in layers):
            raise InvalidArgumentError("layers", layers, "a list of names of layers")
        # Not the base class's layers: those of the unblanked pass are not needed.
        self.hidden = tuple(layers)
        self.dispersion = check_choice("dispersion", dispersion, tuple(MEASURES))
        self.output = check_choice("output", output, OUTPUTS)
        self.fill = check_number("fill", fill)
        self.patch = check_integer("patch", patch, minimum=1)
        self.stride = self.patch if stride is None else check_integer("stride", stride, minimum=1)
        self.units = None if units is None else check_integer("units", units, minimum=1)
        self.pool = bool(pool)
        self.group = bool(group)
        self.seed = check_integer("seed", seed, minimum=0)
        self.batch_size = check_integer("batch_size", batch_size, minimum=1)
        for name in ("center", "scale", "weight", "bias"):
            self.register_buffer(name, torch.empty(0))
        # Drawn at the first pass, and kept: another version of torch may draw others.
        for position in range(len(self.hidden)):
            self.register_buffer(f"chosen_{position}", torch.empty(0, dtype=torch.int64))

    @property
    def settings(self) -> dict[str, Any]:
        """What the constructor was given."""
        return {
            "layers": list(self.hidden),
            "dispersion": self.dispersion,
            "output": self.output,
            "fill": self.fill,
            "patch": self.patch,
            "stride": self.stride,
            "units": self.units,
            "pool": self.pool,
            "group": self.group,
            "seed": self.seed,
            "batch_size": self.batch_size,
        }

    def fit(self, clean: Tensor, adversarial: Tensor, *, folds: int = 5) -> None:
        """Fit the logistic regression; its penalty is chosen by cross-validated accuracy among ten.

        Features are standardised first. Clean and adversarial inputs weigh the same in total.

        Args:
            clean: Clean training inputs ``(N, ...)``, floating point; the authors' code takes a few hundred.
            adversarial: Adversarial ones ``(M, ...)``, made by whatever attack is to be told apart.
            folds: Of the cross-validation, at least 2; N and M are at least that many.

        Raises:
            InvalidArgumentError: These are no such tensors.
            MissingDependencyError: scikit-learn is not installed.
            ModelError: Features are not finite.
        """
        check_integer("folds", folds, minimum=2)
        parts = []
        for name, inputs in (("clean", clean), ("adversarial", adversarial)):
            checked = check_inputs(name, inputs, bounds=_ANY)
            if len(checked) < folds:
                raise InvalidArgumentError(name, f"{len(checked)} inputs", f"at least folds = {folds} {name} inputs")
            parts.append(self._features_of_all(checked))
        rows = torch.cat(parts).double()
        if not bool(torch.isfinite(rows).all()):
            raise ModelError("detector MLLOODetector: leave-one-out features of the training inputs are not finite")
        center, scale = rows.mean(0), rows.std(0, correction=0)
        scale = torch.where(scale > 0, scale, 1)
        targets = torch.cat([torch.full((len(part),), kind) for kind, part in enumerate(parts)])
        weight, bias = _regression((rows - center) / scale, targets, folds)
        self.center, self.scale = center.float(), scale.float()
        self.weight, self.bias = weight.to(rows.device), bias.to(rows.device)

    def features(self, x: Tensor) -> Tensor:
        """The leave-one-out features of inputs, with gradients.

        Args:
            x: Inputs ``(N, ...)``.

        Returns:
            ``(N, F)``: the units of the layers, in order, and the output for the predicted class.
        """
        return self.features_of(observe(self.classifier, x))

    def features_of(self, seen: Observation) -> Tensor:
        """The leave-one-out features of a forward pass, ``(N, F)``, with gradients; further passes are made."""
        x, predicted = seen.inputs, seen.predicted
        squares = squares_of(x, stride=self.stride)
        several = torch.is_grad_enabled() and x.requires_grad and len(x) * len(squares) > self.batch_size
        parts = []
        for rows in torch.split(torch.arange(len(x), device=x.device), max(1, self.batch_size // len(squares))):
            given = x[rows], predicted[rows], squares
            parts.append(
                checkpoint(self._dispersions, *given, use_reentrant=False) if several else self._dispersions(*given)
            )
        return torch.cat(parts)

    def score_of(self, seen: Observation) -> Tensor:
        """The log-odds that the input is adversarial, ``(N,)``.

        Raises:
            ModelError: The detector is not fitted, or to other features.
        """
        if not self.weight.numel():
            raise ModelError("detector MLLOODetector: is not fitted; call fit(clean_inputs, adversarial_inputs) first")
        features = self.features_of(seen)
        if features.shape[1] != len(self.weight):
            raise ModelError(
                f"detector MLLOODetector: was fitted to {len(self.weight)} features and meets {features.shape[1]}; "
                "fit it to this classifier"
            )
        return ((features - self.center) / self.scale) @ self.weight + self.bias

    def _dispersions(self, x: Tensor, predicted: Tensor, squares: Tensor) -> Tensor:
        """Features of a few inputs, ``(n, F)``."""
        size = max(1, self.batch_size // max(1, len(x)))
        parts = torch.split(squares, size)
        several = len(parts) > 1 and torch.is_grad_enabled() and x.requires_grad
        passes = [
            checkpoint(self._blanked_units, x, predicted, part, use_reentrant=False)
            if several
            else self._blanked_units(x, predicted, part)
            for part in parts
        ]
        features = []
        for layer in zip(*passes, strict=True):
            spread = MEASURES[self.dispersion](torch.cat(layer, 2))
            features.append(spread.mean(1, keepdim=True) if self.group else spread)
        return torch.cat(features, 1)

    def _blanked_units(self, x: Tensor, predicted: Tensor, squares: Tensor) -> tuple[Tensor, ...]:
        """Units of every layer with each square blanked, ``(n, units, squares)`` each."""
        count = len(squares)
        seen = observe(self.classifier, blanked(x, squares, patch=self.patch, fill=self.fill), self.hidden)
        layers = [
            self._pick(position, units_of(seen.layers[name], pool=self.pool))
            for position, name in enumerate(self.hidden)
        ]
        values = seen.logits.softmax(1) if self.output == "probability" else seen.logits
        layers.append(values.gather(1, predicted.repeat_interleave(count)[:, None]))
        return tuple(layer.view(len(x), count, layer.shape[1]).transpose(1, 2) for layer in layers)

    def _pick(self, position: int, values: Tensor) -> Tensor:
        """Those of a layer's units ``(n, all)`` that are looked at."""
        if self.units is None or values.shape[1] <= self.units:
            return values
        chosen: Tensor = getattr(self, f"chosen_{position}")
        if not len(chosen):
            order = torch.randperm(values.shape[1], generator=stream(self.seed, position, "ml-loo units"))
            chosen = order[: self.units].sort().values.to(values.device)
            setattr(self, f"chosen_{position}", chosen)
        return values[:, chosen]

    def _features_of_all(self, inputs: Tensor) -> Tensor:
        device = module_device(self.classifier)
        with torch.no_grad():
            return torch.cat([self.features(batch.to(device)) for batch in torch.split(inputs, 256)])


def _regression(rows: Tensor, targets: Tensor, folds: int) -> tuple[Tensor, Tensor]:
    """Weights ``(F,)`` and intercept ``()`` of the cross-validated logistic regression, float32, on the CPU."""
    try:
        from sklearn.linear_model import LogisticRegressionCV
    except ImportError as error:
        raise MissingDependencyError('MLLOODetector.fit needs scikit-learn: pip install "robust-ext[cli]"') from error
    with warnings.catch_warnings():
        # New versions announce other defaults, under names that old versions do not know.
        warnings.simplefilter("ignore", FutureWarning)
        model = LogisticRegressionCV(cv=folds, class_weight="balanced", scoring="accuracy", max_iter=2000)
        model.fit(rows.cpu().numpy(), targets.numpy())
    return torch.tensor(model.coef_[0], dtype=torch.float32), torch.tensor(float(model.intercept_[0]))
