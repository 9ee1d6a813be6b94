"""LID: local intrinsic dimensionality in several layers.

Ma, Li, Wang, Erfani, Wijewickrema, Schoenebeck, Song, Houle, Bailey, "Characterizing Adversarial Subspaces Using Local
Intrinsic Dimensionality" (2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import stream
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_integer
from robust_ext.detectors._features.dimension import local_dimension
from robust_ext.detectors._features.regression import Regression
from robust_ext.detectors._features.three_sets import three_sets
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation, observe


class LIDDetector(Detector):
    """Logistic regression on the local intrinsic dimensionality of several layers (Ma et al. 2018).

    One feature for the input and one for each named layer: the estimate
    ``local_dimension`` among reference inputs, of flattened activations. Features are moved to [0, 1]. The score is the
    regression's log-odds: above 0 where it holds an input for adversarial.

    References are one fixed set of training data. The authors' code takes the minibatch at hand, in which every noisy
    or adversarial input meets its own clean twin: the distance to the twin then tells the kinds apart, which no
    defender knows, and scores depend on the batch.

    Args:
        classifier: The network it watches.
        layers: Names of layers beside the input, as in ``classifier.named_modules()``; the authors take all.
        neighbours: k, at least 2: 20 for MNIST, 30 for CIFAR-10.
        size: How many references, more than ``neighbours``; the authors' minibatches have 100 inputs.

    Attributes:
        regression: On the estimates.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> clean, _ = load_dataset("digits", split="train").take(range(300))
        >>> detector = LIDDetector(digits_network(), layers=["1", "3", "6", "7"])
        >>> detector.fit(clean, 1 - clean)
        >>> bool(detector.score(1 - clean).mean() > detector.score(clean).mean())
        True
    """

    def __init__(self, classifier: nn.Module, *, layers: Sequence[str], neighbours: int = 20, size: int = 100) -> None:
        super().__init__(classifier)
        if isinstance(layers, str) or not all(isinstance(name, str) for name in layers):
            raise InvalidArgumentError("layers", layers, "a list of names of layers")
        self.layers = tuple(layers)
        self.neighbours = check_integer("neighbours", neighbours, minimum=2)
        self.size = check_integer("size", size, minimum=self.neighbours + 1)
        for position in range(len(self.layers) + 1):
            self.register_buffer(f"references_{position}", torch.empty(0))
        self.regression = Regression(scaling="minmax")

    @property
    def settings(self) -> dict[str, Any]:
        """What the constructor was given."""
        return {"layers": list(self.layers), "neighbours": self.neighbours, "size": self.size}

    def fit(
        self,
        clean: Tensor,
        adversarial: Tensor,
        *,
        references: Tensor | None = None,
        noise: float | None = None,
        bounds: Sequence[float] | None = (0.0, 1.0),
        folds: int = 5,
        batch_size: int = 256,
        seed: int = 0,
    ) -> None:
        """Fix the references, and fit the regression against clean and noisy inputs.

        Args:
            clean: Clean inputs ``(N, ...)``, floating point.
            adversarial: Adversarial ones ``(M, ...)``, made by whatever attack is to be told apart. Unless both
                ``references`` and ``noise`` are given, row i is made from clean row i.
            references: Training data ``(R, ...)`` without the clean inputs, of which ``size`` are drawn by the seed.
                Left out, they are drawn from the clean rows, and neither they nor what was made from them is trained
                on.
            noise: Standard deviation of the Gaussian noise of the noisy inputs. Left out, their perturbations are as
                large as the adversarial ones, as root mean square.
            bounds: What noisy inputs are clipped to; None to leave them.
            folds: Of the cross-validation, at least 2.
            batch_size: Inputs in one pass.
            seed: Of the references and the noise; global generators are left alone.

        Raises:
            InvalidArgumentError: These are no such tensors or settings.
            MissingDependencyError: scikit-learn is not installed.
            ModelError: Features are not finite.
        """
        check_integer("batch_size", batch_size, minimum=1)
        sets = three_sets(
            clean,
            adversarial,
            references=references,
            apart=self.size,
            noise=noise,
            bounds=bounds,
            folds=folds,
            seed=seed,
        )
        if len(sets.references) < self.size:
            raise InvalidArgumentError(
                "references", f"{len(sets.references)} inputs", f"at least size = {self.size} clean inputs"
            )
        order = torch.randperm(len(sets.references), generator=stream(seed, "references"))[: self.size]
        chosen = sets.references[order.to(sets.references.device)]
        device = module_device(self.classifier)
        with torch.no_grad():
            passes = [
                self._activations(observe(self.classifier, batch.to(device), self.layers))
                for batch in torch.split(chosen, batch_size)
            ]
        for position, found in enumerate(zip(*passes, strict=True)):
            setattr(self, f"references_{position}", torch.cat(found))
        negatives = [self._features_of_all(part, batch_size) for part in (sets.clean, sets.noisy)]
        self.regression.fit(negatives, self._features_of_all(sets.adversarial, batch_size), folds=folds)

    def features_of(self, seen: Observation) -> Tensor:
        """The estimates of a forward pass, ``(N, 1 + layers)``, the input first, with gradients.

        Raises:
            ModelError: The detector is not fitted, or to another network.
        """
        features = []
        for position, points in enumerate(self._activations(seen)):
            references: Tensor = getattr(self, f"references_{position}")
            if not references.numel():
                raise ModelError(
                    "detector LIDDetector: is not fitted; call fit(clean_inputs, adversarial_inputs) first"
                )
            if points.shape[1] != references.shape[1]:
                name = "the input" if not position else f"layer {self.layers[position - 1]!r}"
                raise ModelError(
                    f"detector LIDDetector: was fitted to {references.shape[1]} values of {name} and meets "
                    f"{points.shape[1]}; fit it to this classifier"
                )
            features.append(local_dimension(points, references, neighbours=self.neighbours))
        return torch.stack(features, 1)

    def score_of(self, seen: Observation) -> Tensor:
        """The log-odds that the input is adversarial, ``(N,)``.

        Raises:
            ModelError: The detector is not fitted, or to another network.
        """
        out: Tensor = self.regression(self.features_of(seen))
        return out

    def _activations(self, seen: Observation) -> list[Tensor]:
        return [seen.inputs.flatten(1), *(seen.layers[name].flatten(1) for name in self.layers)]

    def _features_of_all(self, inputs: Tensor, batch_size: int) -> Tensor:
        device = module_device(self.classifier)
        with torch.no_grad():
            parts = torch.split(inputs, batch_size)
            return torch.cat([self.features_of(observe(self.classifier, x.to(device), self.layers)) for x in parts])
